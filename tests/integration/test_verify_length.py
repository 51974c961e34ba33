"""How much of a draft is verified changes what passes cost, never the tokens: every drafter, alone and in company."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import exp
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime, SchedulerConfig
from outrider.plans.pass_prices import PassPrices, Price, write_pass_prices
from outrider.plans.plan import open_plan
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.drafters.verify_length import VerifyLength
from outrider.runtime.options.options import Options
from outrider.runtime.pass_prices import conditions_here
from outrider.runtime.trace import Round
from tests.conftest import REJECTING, TOY_DRAFTERS
from tests.integration.long_context import prompt
from tests.integration.shifting_rule import Shifting

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]
DRAFTED_BY_ENGINES = ("chain", "sure", "bushy", "head", "block")
FREE, STEEP, STAIRS = (
    [0.0],
    [1000.0],
    [0.0, 0.0, 1.0],
)  # what a row more costs, again and again, after a first one of 1
Priced = Callable[[Path, list[float]], Path]


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Priced:
    """A copy of a plan whose passes are said to cost so much."""

    def copy(plan: Path, steps: list[float]) -> Path:
        there = shutil.copytree(plan, tmp_path_factory.mktemp("priced") / "plan")
        costs = accumulate((steps * 64)[:64], initial=1.0)
        prices = tuple(Price(rows=rows, ms=ms) for rows, ms in enumerate(costs, 1))
        here = conditions_here(open_plan(there), "onnxruntime-cpu", 1)
        write_pass_prices(PassPrices(**vars(here), context=0, prices=prices), there)
        return there

    return copy


@pytest.fixture(autouse=True)
def _by_price_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, drafters draft; and a rate is known as soon as a round is."""
    monkeypatch.setattr(AdaptiveSpeculation, "gain", lambda self: 2.0)
    monkeypatch.setattr("outrider.runtime.drafters.verify_length._FEWEST", 1)


def options(**more: Any) -> Options:
    found = {"max_new_tokens": 60, "ignore_eos": True, **more}
    return Options(**found)  # type: ignore[typeddict-item]


@pytest.fixture(scope="module", params=[FREE, STEEP, STAIRS], ids=["free", "steep", "stairs"])
def alone(toy_plan: Path, priced: Priced, request: pytest.FixtureRequest) -> tuple[Runtime, list[float]]:
    return Runtime.load(priced(toy_plan, request.param), threads=1), request.param


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
def test_the_tokens_are_those_of_plain_decoding(
    alone: tuple[Runtime, list[float]], toy: Runtime, drafter: str, temperature: float
) -> None:
    runtime, steps = alone
    sampling = options(temperature=temperature, seed=3)
    expected = toy.generate(PROMPT, **sampling | Options(drafter="none"))
    rounds: list[Round] = []
    with runtime.session() as session:
        found = session.generate(PROMPT, **sampling | Options(drafter=drafter, on_round=rounds.append))
        more = session.generate(PROMPT, **sampling | Options(drafter=drafter))
    assert found.token_ids == expected.token_ids
    with toy.session() as session:
        session.generate(PROMPT, **sampling | Options(drafter="none"))
        assert session.generate(PROMPT, **sampling | Options(drafter="none")).token_ids == more.token_ids
    assert sum(each.left_out for each in rounds) == found.stats.left_out
    assert sum(len(each.nodes) for each in rounds) == found.stats.drafted
    if drafter not in DRAFTED_BY_ENGINES:
        return
    if steps == FREE:
        assert found.stats.left_out == more.stats.left_out == 0
    if steps == STEEP:
        assert found.stats.left_out > 0
        cut = [each for each in rounds if each.left_out]
        assert all(each.nodes for each in cut)  # what was drafted is verified at least in part
        assert min(len(each.nodes) for each in cut) < 4


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head", "sure", "block", "ngram"])
def test_who_keeps_drafting_verifies_whole_drafts(toy_plan: Path, priced: Priced, toy: Runtime, drafter: str) -> None:
    runtime = Runtime.load(priced(toy_plan, STEEP), threads=1)
    always = options(drafter=drafter, auto_disable=False)
    expected, seen = list[Round](), list[Round]()
    toy.generate(PROMPT, **always | Options(on_round=expected.append))
    found = runtime.generate(PROMPT, **always | Options(on_round=seen.append))
    assert found.stats.left_out == 0
    assert [len(each.nodes) for each in seen] == [len(each.nodes) for each in expected]


@pytest.mark.parametrize("limits", [{"draft_tokens": 2}, {"draft_depth": 1}, {"draft_tokens": 3, "draft_depth": 2}])
@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
def test_limits_of_a_request_bind_as_well(
    alone: tuple[Runtime, list[float]], toy: Runtime, drafter: str, limits: dict[str, int]
) -> None:
    rounds: list[Round] = []
    found = alone[0].generate(PROMPT, **options(drafter=drafter, on_round=rounds.append, **limits))
    assert found.token_ids == toy.generate(PROMPT, **options(drafter="none")).token_ids
    for each in rounds:
        assert len(each.nodes) <= limits.get("draft_tokens", 99)
        assert max((node.depth for node in each.nodes), default=0) <= limits.get("draft_depth", 99)
        if alone[1] == FREE:
            assert each.left_out == 0  # a request's limits are no price


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head", "block", "ngram"])
def test_what_was_verified_is_what_is_learned(
    toy_plan: Path, priced: Priced, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chances, and which nodes came, are those that who watches the rounds sees."""
    told: list[tuple[list[int], list[bool], list[float]]] = []

    def note(self: VerifyLength, parent: list[int], scores: list[float], accepted: set[int], *, by_host: bool) -> None:
        assert by_host == (drafter == "ngram")
        own = [exp(score - (scores[above] if above >= 0 else 0.0)) for above, score in zip(parent, scores, strict=True)]
        told.append((parent, [node in accepted for node in range(len(parent))], own))

    monkeypatch.setattr(VerifyLength, "note_verified", note)
    runtime, rounds = Runtime.load(priced(toy_plan, STAIRS), threads=1), list[Round]()
    runtime.generate(PROMPT, **options(drafter=drafter, on_round=rounds.append))
    seen = [each.nodes for each in rounds if each.nodes]
    assert len(told) == len(seen)
    for (parent, accepted, own), nodes in list(zip(told, seen, strict=True))[:-1]:  # the last one is cut at the limit
        assert parent == [node.parent - 1 for node in nodes]
        assert accepted == [node.accepted for node in nodes]
        assert own == pytest.approx([node.probability for node in nodes])
    assert any(any(accepted) for _, accepted, _ in told) or drafter in ("head", "ngram")  # which are hardly ever right


@pytest.fixture(scope="module", params=["in-one-sequence", "batching"])
def serving(everything_plan: Path, priced: Priced, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = Runtime.load(priced(everything_plan, STEEP), threads=1, scheduler=SchedulerConfig(mode=request.param))
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_in_company(serving: Runtime, everything: Runtime, temperature: float) -> None:
    own = options(temperature=temperature, seed=5)
    drafters = [*TOY_DRAFTERS, "none"]
    found = [
        handle.result(60)
        for handle in serving.submit_all([(PROMPT, own | Options(drafter=drafter)) for drafter in drafters])
    ]
    expected = everything.generate(PROMPT, **own | Options(drafter="none")).token_ids
    assert [each.token_ids for each in found] == [expected] * len(drafters)
    by_name = dict(zip(drafters, found, strict=True))
    assert all(by_name[name].stats.left_out > 0 for name in DRAFTED_BY_ENGINES)
    assert by_name["none"].stats.left_out == 0
    assert sum(each.stats.accepted for each in found) > 0


def test_with_rules_in_company(serving: Runtime, everything: Runtime) -> None:
    ruled = options(constraint=Shifting())
    asked = [(PROMPT, ruled | Options(drafter=drafter)) for drafter in TOY_DRAFTERS]
    expected = everything.generate(PROMPT, **ruled | Options(drafter="none")).token_ids
    assert all(handle.result(60).token_ids == expected for handle in serving.submit_all(asked))


def test_drafts_by_rejection_are_verified_whole(serving: Runtime, everything: Runtime) -> None:
    """Their tokens depend on every draft."""
    for drafter in REJECTING:
        asked = options(drafter=drafter, temperature=1.0, seed=5, max_new_tokens=24)
        (handle,) = serving.submit_all([(PROMPT, asked)])
        found = handle.result(60)
        assert found.stats.left_out == 0
        assert found.token_ids == everything.generate(PROMPT, **asked).token_ids


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
@pytest.mark.usefixtures("run_ahead")
def test_over_the_partial_cache(everything_plan: Path, priced: Priced, everything: Runtime, drafter: str) -> None:
    runtime, behind = Runtime.load(priced(everything_plan, STEEP), threads=1), prompt(3, 60)
    found = runtime.generate(behind, **options(drafter=drafter, partial_kv="lossless"))
    assert found.stats.partial_rounds > 0
    assert found.stats.left_out > 0
    assert found.token_ids == everything.generate(behind, **options(drafter="none")).token_ids
