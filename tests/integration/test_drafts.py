"""What drafters draft, keep and have verified, by limits of a request and the price of a pass: never other tokens."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import Runtime, SchedulerConfig, Session
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.plans.pass_prices import PassPrices, Price, write_pass_prices
from outrider.plans.plan import open_plan
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.drafters.base import clip_draft
from outrider.runtime.drafters.engine import EngineDrafter
from outrider.runtime.drafters.verify_length import VerifyLength
from outrider.runtime.options.options import Options
from outrider.runtime.pass_prices import conditions_here
from outrider.runtime.trace import Node, RoundTrace
from tests.conftest import REJECTING, TOY_DRAFTERS, BuildOnce, call_before
from tests.integration.long_context import prompt
from tests.integration.shifting_rule import Shifting

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]
LIMITS = [{"draft_tokens": 1}, {"draft_tokens": 3}, {"draft_depth": 1}, {"draft_tokens": 5, "draft_depth": 2}]


def asked(**more: Any) -> Options:
    found = {"max_new_tokens": 50, "ignore_eos": True, "auto_disable": False, **more}
    return Options(**found)  # type: ignore[typeddict-item]


def check_rounds(rounds: list[RoundTrace], draft_tokens: int = 99, draft_depth: int = 99) -> None:
    for each in rounds:
        assert len(each.nodes) <= draft_tokens
        assert max((node.depth for node in each.nodes), default=0) <= draft_depth
        for place, node in enumerate(each.nodes, 1):
            assert 0 <= node.parent < place
            assert node.depth == 1 + (each.nodes[node.parent - 1].depth if node.parent else 0)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_keeps_to_the_limits(toy: Runtime, drafter: str, limits: dict[str, int], temperature: float) -> None:
    rounds: list[RoundTrace] = []
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 2}
    expected = toy.generate(PROMPT, **asked(drafter="none", **sampling))
    found = toy.generate(PROMPT, **asked(drafter=drafter, on_round=rounds.append, **limits, **sampling))
    assert found.token_ids == expected.token_ids
    check_rounds(rounds, **limits)
    assert found.stats.drafted > 0
    assert found.stats.accepted > 0 or drafter not in ("chain", "bushy")
    most = min(limits.get("draft_tokens", 99), 99)
    if drafter == "bushy" and "draft_depth" not in limits:  # a whole tree, but where its KV is fed alone
        assert Counter(len(each.nodes) for each in rounds).most_common(1)[0][0] == most


def test_in_company(serving: Runtime) -> None:
    rounds: list[list[RoundTrace]] = [[] for _ in TOY_DRAFTERS]
    limits = [LIMITS[place % len(LIMITS)] for place in range(len(TOY_DRAFTERS))]
    both = [
        (PROMPT, asked(drafter=drafter, on_round=rounds[place].append, constraint=Shifting(), **limits[place]))
        for place, drafter in enumerate(TOY_DRAFTERS)
    ]
    found = [handle.result(60) for handle in serving.submit_all(both)]
    expected = serving.generate(PROMPT, **asked(drafter="none", constraint=Shifting()))
    assert all(each.token_ids == expected.token_ids for each in found)
    for own, seen in zip(limits, rounds, strict=True):
        check_rounds(seen, **own)
    assert sum(each.stats.accepted for each in found) > 10


@pytest.mark.parametrize(
    ("drafter", "limits", "words"),
    [
        ("chain", {"draft_tokens": 12}, "draft_tokens is 12; pass a whole number from 1 to 11"),
        ("chain", {"draft_depth": 12}, "draft_depth is 12; pass a whole number from 1 to 11"),
        ("classical", {"draft_tokens": 2}, "draft_tokens is given, and tokens of the drafter 'classical', which is"),
    ],
)
def test_what_cannot_be_is_refused(everything: Runtime, drafter: str, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        everything.generate(PROMPT, **asked(drafter=drafter, **limits))


def test_nodes_within_limits() -> None:
    parent = [-1, -1, 0, 0, 1, 2]
    scores = [-0.1, -0.2, -0.1, -3.0, -0.4, -0.2]
    assert clip_draft(parent, scores, None, None) == [0, 1, 2, 3, 4, 5]
    assert clip_draft(parent, scores, 3, None) == [0, 1, 2]
    assert clip_draft(parent, scores, 4, None) == [0, 1, 2, 5]
    assert clip_draft(parent, scores, None, 1) == [0, 1]
    assert clip_draft(parent, scores, 4, 2) == [0, 1, 2, 4]
    assert clip_draft([-1, 0, 1], None, 2, None) == [0, 1]


DRAFTED_BY_ENGINES = ("chain", "bushy", "head", "block")
FREE, STEEP, STAIRS = [0.0], [1000.0], [0.0, 0.0, 1.0]  # what each row after the first, of 1, costs; repeated
Priced = Callable[[Path, list[float]], Path]


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Priced:
    """A copy of a plan whose passes have the given costs."""

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
    """Drafters draft, independent of the clock; and a rate is known as soon as a round is."""
    monkeypatch.setattr(AdaptiveSpeculation, "gain", lambda self: 2.0)
    monkeypatch.setattr("outrider.runtime.drafters.verify_length._FEWEST", 1)


def options(**more: Any) -> Options:
    return Options(**{"max_new_tokens": 60, "ignore_eos": True} | more)  # type: ignore[typeddict-item]


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
    rounds: list[RoundTrace] = []
    with runtime.session() as session:
        found = session.generate(PROMPT, **sampling | Options(drafter=drafter, on_round=rounds.append))
        more = session.generate(PROMPT, **sampling | Options(drafter=drafter))
    assert found.token_ids == expected.token_ids
    with toy.session() as session:
        session.generate(PROMPT, **sampling | Options(drafter="none"))
        assert session.generate(PROMPT, **sampling | Options(drafter="none")).token_ids == more.token_ids
    assert sum(each.left_out for each in rounds) == found.stats.left_out
    assert sum(len(each.nodes) for each in rounds) == found.stats.drafted
    both: list[list[RoundTrace]] = [[], []]
    for each, seen in zip((toy, runtime), both, strict=True):  # what is always on is verified whole
        each.generate(PROMPT, **sampling | Options(drafter=drafter, auto_disable=False, on_round=seen.append))
    assert [len(each.nodes) for each in both[0]] == [len(each.nodes) for each in both[1]]
    if drafter not in DRAFTED_BY_ENGINES:
        return
    if steps == FREE:
        assert found.stats.left_out == more.stats.left_out == 0
    if steps == STEEP:
        assert found.stats.left_out > 0
        cut = [each for each in rounds if each.left_out]
        assert all(each.nodes for each in cut)  # what was drafted is verified at least in part
        assert min(len(each.nodes) for each in cut) < 4


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head", "block", "ngram"])
def test_what_was_verified_is_what_is_learned(
    toy_plan: Path, priced: Priced, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chances, and which nodes were accepted, are those of the rounds that a caller watches."""
    noted: list[tuple[list[int], list[bool], list[float]]] = []

    def note(self: VerifyLength, parent: list[int], scores: list[float], accepted: set[int], *, by_host: bool) -> None:
        assert by_host == (drafter == "ngram")
        own = [exp(score - (scores[above] if above >= 0 else 0.0)) for above, score in zip(parent, scores, strict=True)]
        noted.append((parent, [node in accepted for node in range(len(parent))], own))

    monkeypatch.setattr(VerifyLength, "note_verified", note)
    runtime, rounds = Runtime.load(priced(toy_plan, STAIRS), threads=1), list[RoundTrace]()
    runtime.generate(PROMPT, **options(drafter=drafter, on_round=rounds.append))
    seen = [each.nodes for each in rounds if each.nodes]
    assert len(noted) == len(seen)
    for (parent, accepted, own), nodes in list(zip(noted, seen, strict=True))[:-1]:  # the last one is cut at the limit
        assert parent == [node.parent - 1 for node in nodes]
        assert accepted == [node.accepted for node in nodes]
        assert own == pytest.approx([node.probability for node in nodes])
    assert any(any(accepted) for _, accepted, _ in noted) or drafter in ("head", "ngram")  # which are hardly ever right


@pytest.fixture(scope="module", params=["in-one-sequence", "batching"])
def priced_serving(everything_plan: Path, priced: Priced, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = Runtime.load(priced(everything_plan, STEEP), threads=1, scheduler=SchedulerConfig(mode=request.param))
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_in_company_by_price(priced_serving: Runtime, everything: Runtime, temperature: float) -> None:
    own = options(temperature=temperature, seed=5)
    drafters = [*TOY_DRAFTERS, "none"]
    ruled = options(constraint=Shifting())
    handles = priced_serving.submit_all(
        [(PROMPT, asked | Options(drafter=name)) for asked in (own, ruled) for name in drafters]
    )
    found, with_rules = ([handles.pop(0).result(60) for _ in drafters] for _ in range(2))
    expected_by_rule = everything.generate(PROMPT, **ruled | Options(drafter="none")).token_ids
    assert [each.token_ids for each in with_rules] == [expected_by_rule] * len(drafters)
    expected = everything.generate(PROMPT, **own | Options(drafter="none")).token_ids
    assert [each.token_ids for each in found] == [expected] * len(drafters)
    by_name = dict(zip(drafters, found, strict=True))
    assert all(by_name[name].stats.left_out > 0 for name in DRAFTED_BY_ENGINES)
    assert by_name["none"].stats.left_out == 0
    for drafter in REJECTING:  # whose tokens depend on every draft
        asked = options(drafter=drafter, temperature=1.0, seed=5, max_new_tokens=24)
        rejecting = priced_serving.submit(PROMPT, **asked).result(60)
        assert rejecting.stats.left_out == 0
        assert rejecting.token_ids == everything.generate(PROMPT, **asked).token_ids
    assert sum(each.stats.accepted for each in found) > 0


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
@pytest.mark.usefixtures("run_ahead")
def test_over_the_partial_cache(everything_plan: Path, priced: Priced, everything: Runtime, drafter: str) -> None:
    runtime, tokens = Runtime.load(priced(everything_plan, STEEP), threads=1), prompt(3, 60)
    found = runtime.generate(tokens, **options(drafter=drafter, partial_kv="lossless"))
    assert found.stats.partial_rounds > 0
    assert found.stats.left_out > 0
    assert found.token_ids == everything.generate(tokens, **options(drafter="none")).token_ids


CHUNKS = [(37 * i) % 299 + 1 for i in range(50)]  # several chunks
SAMPLINGS = (Options(), Options(temperature=1.0, seed=3))
ALWAYS = Options(ignore_eos=True, auto_disable=False)
Fed = tuple[int, int]  # tokens with KV, tokens after them


def drafter_of(session: Session, name: str) -> EngineDrafter:
    return session.loop.drafting.engine_drafters[name]


def kv_of(session: Session, name: str, length: int) -> NDArray[np.float32]:
    kv: NDArray[np.float32] = session.buffers.array(name, names.KV)[:, :, :, :length]
    return kv


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["chain", "bushy"])
def test_kept_indices_are_those_of_feeding_the_tokens(toy: Runtime, name: str, sampling: Options) -> None:
    """But for the last bits, which depend on how many tokens are computed at once."""
    session, fresh = toy.session(), toy.session()
    run = session.generate(CHUNKS, drafter=name, max_new_tokens=80, **sampling, **ALWAYS)
    assert run.stats.accepted > 10
    length = drafter_of(session, name).cache.length
    assert length >= len(session.token_ids) - 3  # what the last draft accepted comes with the next
    fresh.generate(session.token_ids[:length], drafter=name, max_new_tokens=3, **ALWAYS)
    assert drafter_of(fresh, name).cache.length >= length
    np.testing.assert_allclose(kv_of(session, name, length), kv_of(fresh, name, length), atol=1e-5)
    np.testing.assert_array_equal(session.buffers.array(name, names.SLOT_POSITIONS)[0, :length], np.arange(length))
    assert (session.buffers.array(name, names.BIM)[0, :length] == 0).all()


def fed_and_lacking(session: Session, name: str, sampling: Options) -> tuple[list[Fed], list[Fed]]:
    """What each round fed the drafter, and what it left it to be fed by the next one."""
    drafter = drafter_of(session, name)
    step, program, last = drafter._step, session.programs[names.speculate(name)], [0, 0]

    def note() -> None:
        last[:] = int(step.past_length[0]), step.new_tokens

    row = np.array([-1, 0, 1, 2, -1]) if name == "chain" else session.buffers.array(name, names.TREE_SLOTS)
    fed: list[Fed] = []
    lacking: list[Fed] = []

    def watch(seen: RoundTrace) -> None:
        if seen.nodes:
            path = [index for index, node in enumerate(seen.nodes, start=1) if node.accepted]
            without = sum(row[node] < 0 for node in path)
            fed.append((last[0], last[1]))
            lacking.append((sum(fed[-1]) + len(path) - without, without + 1))

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, program, "run", note)
        session.generate(CHUNKS, drafter=name, max_new_tokens=80, on_round=watch, **sampling, **ALWAYS)
    return fed, lacking


@pytest.mark.parametrize("name", ["chain", "bushy"])
def test_a_draft_model_is_fed_the_tokens_it_lacks_and_no_other(toy: Runtime, name: str) -> None:
    """The tip; before it, the last accepted node where no level had run it."""
    counts: set[int] = set()
    for sampling in SAMPLINGS:
        fed, lacking = fed_and_lacking(toy.session(), name, sampling)
        assert fed[1:] == lacking[:-1]
        counts |= {tokens for _, tokens in fed[1:]}
    assert counts == {1, 2}


LONG = Options(max_new_tokens=90, ignore_eos=True, auto_disable=False, temperature=0.8, seed=4)


def drafts(runtime: Runtime, drafter: str) -> tuple[list[int], list[list[Node]], int]:
    """Tokens, what each round has drafted, and how often the head read features apart from a draft."""
    rounds: list[RoundTrace] = []
    session, runs = runtime.session(), list[None]()
    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, session.programs[names.extend("head")], "run", lambda: runs.append(None))
        found = session.generate(prompt(2, 60), drafter=drafter, on_round=rounds.append, **LONG)
    return found.token_ids, [each.nodes for each in rounds], len(runs)


@pytest.mark.parametrize("room", [True, False])
def test_a_head_drafts_as_if_it_had_seen_the_rounds_that_ngrams_drafted(
    toy: Runtime, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """Those rounds cost it nothing; where there is no room for their features, it reads them at once."""
    tokens, waited, runs = drafts(toy, "mixed")
    if room:
        monkeypatch.setattr(EngineDrafter, "skip_round", EngineDrafter.sync)
    else:
        monkeypatch.setattr("outrider.runtime.drafters.kept_features.KeptFeatures.keep", lambda self, rows: None)
    expected, seen, often = drafts(toy, "mixed")
    assert (tokens, waited) == (expected, seen)
    assert 3 == runs < often  # the prompt's, 60 tokens in parts of 16; the last one drafts


HEAD = "drafters=[{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 16, depth: 1, nodes: 64}}]"


def test_a_head_feeds_more_pairs_than_its_step_holds_in_several_passes(built: BuildOnce) -> None:
    runtime, accepted = Runtime.load(built("small-chunk", [HEAD, "capacity.prefill_chunk=1"]), threads=1), 0
    for seed in range(4):
        options = Options(max_new_tokens=100, temperature=1.0, seed=seed) | ALWAYS
        drafted = runtime.generate([5, 6, 7] * 5, drafter="head", **options)
        assert drafted.token_ids == runtime.generate([5, 6, 7] * 5, drafter="none", **options).token_ids
        accepted += drafted.stats.accepted
    assert accepted, "no round left more pairs than a step holds"
