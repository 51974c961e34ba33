"""How much is drafted, by request: within the limits, never other tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import Runtime, SchedulerConfig
from outrider.plans.errors import RequestError
from outrider.runtime.drafters.base import clip_draft
from outrider.runtime.options.options import Options
from outrider.runtime.trace import Round
from tests.conftest import TOY_DRAFTERS
from tests.integration.shifting_rule import Shifting

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]
LIMITS = [
    {"draft_tokens": 1},
    {"draft_tokens": 3},
    {"draft_depth": 1},
    {"draft_depth": 2},
    {"draft_tokens": 5, "draft_depth": 2},
]


def asked(**more: Any) -> Options:
    found = {"max_new_tokens": 50, "ignore_eos": True, "auto_disable": False, **more}
    return Options(**found)  # type: ignore[typeddict-item]


def check_rounds(rounds: list[Round], draft_tokens: int = 99, draft_depth: int = 99) -> None:
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
    rounds: list[Round] = []
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 2}
    expected = toy.generate(PROMPT, **asked(drafter="none", **sampling))
    found = toy.generate(PROMPT, **asked(drafter=drafter, on_round=rounds.append, **limits, **sampling))
    assert found.token_ids == expected.token_ids
    check_rounds(rounds, **limits)
    assert found.stats.drafted > 0
    assert found.stats.accepted > 0 or drafter not in ("chain", "sure", "bushy")
    most = min(limits.get("draft_tokens", 99), 99)
    if drafter == "bushy" and "draft_depth" not in limits:  # as many as there may be, but where its KV is fed alone
        assert Counter(len(each.nodes) for each in rounds).most_common(1)[0][0] == most


def test_of_a_tree_the_likeliest_nodes_stay(toy: Runtime) -> None:
    whole, cut = list[Round](), list[Round]()
    prompt = [*PROMPT, 5]
    toy.generate(prompt, **asked(drafter="bushy", max_new_tokens=4, on_round=whole.append))
    toy.generate(prompt, **asked(drafter="bushy", max_new_tokens=4, on_round=cut.append, draft_tokens=4))

    def likelihoods(each: Round) -> list[float]:
        found: list[float] = [1.0]
        for node in each.nodes:
            assert node.probability is not None
            found.append(found[node.parent] * node.probability)
        return found[1:]

    one, other = (next(each for each in rounds if each.nodes) for rounds in (whole, cut))
    best = sorted(likelihoods(one), reverse=True)[:4]
    assert sorted(likelihoods(other), reverse=True) == pytest.approx(best)


@pytest.fixture(scope="module", params=["in-one-sequence", "batching"])
def serving(everything_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = Runtime.load(everything_plan, threads=1, scheduler=SchedulerConfig(mode=request.param))
    yield runtime
    runtime.close(timeout=60)


def test_in_company(serving: Runtime) -> None:
    rounds: list[list[Round]] = [[] for _ in TOY_DRAFTERS]
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


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.usefixtures("run_ahead")
def test_over_the_partial_cache(long: Runtime, mode: Any) -> None:
    options = asked(partial_kv=mode, max_new_tokens=60, draft_tokens=2)
    found = long.generate(PROMPT * 3, **options | Options(drafter="bushy"))
    assert found.stats.partial_rounds > 0
    if mode == "lossless":
        assert found.token_ids == long.generate(PROMPT * 3, **options | Options(drafter="none")).token_ids


@pytest.mark.parametrize("drafter", ["sure", "chain", "head", "bushy"])
def test_turns_with_other_limits(toy: Runtime, drafter: str) -> None:
    turns: list[dict[str, Any]] = [
        {},
        {"draft_tokens": 2},
        {"draft_depth": 1},
        {"temperature": 1.0, "seed": 0},
        {"draft_tokens": 1},
    ]
    with toy.session() as session, toy.session() as plain:
        for place, limits in enumerate(turns):
            own = asked(max_new_tokens=12, **limits)
            found = session.generate([place + 1], **own | Options(drafter=drafter))
            assert found.token_ids == plain.generate([place + 1], **own | Options(drafter="none")).token_ids


def test_lengths_of_chains_by_entropy(toy: Runtime) -> None:
    expected = toy.generate(PROMPT, **asked(drafter="none")).token_ids

    def lengths(**limits: int) -> set[int]:
        rounds: list[Round] = []
        found = toy.generate(PROMPT, **asked(drafter="sure", on_round=rounds.append, **limits))
        assert found.token_ids == expected
        return {len(each.nodes) for each in rounds[1:-6]}  # the last have no room

    plan = lengths()
    assert max(plan) > 1
    assert lengths(gamma_max=1) == {1}
    assert lengths(gamma_min=4, gamma_max=4) == {4}
    assert min(lengths(gamma_min=5)) == 5
    assert max(lengths(gamma_min=5, draft_tokens=2)) == 2
    assert lengths() == plan


@pytest.mark.parametrize(
    ("drafter", "limits", "words"),
    [
        ("chain", {"draft_tokens": 12}, "draft_tokens is 12; pass a whole number from 1 to 11"),
        ("chain", {"draft_depth": 12}, "draft_depth is 12; pass a whole number from 1 to 11"),
        ("sure", {"gamma_max": 7}, "gamma_max is 7; pass a whole number from 1 to 6"),
        ("sure", {"gamma_min": 4, "gamma_max": 3}, "gamma_min is 4; pass a whole number from 1 to 3"),
        ("chain", {"gamma_max": 3}, "gamma_max is given, and the drafter 'chain' has no chains that are as long as"),
        ("none", {"gamma_min": 3}, "gamma_min is given, and the drafter 'none' has no chains"),
        ("classical", {"draft_tokens": 2}, "draft_tokens is given, and tokens of the drafter 'classical', which is"),
        ("classical-egag", {"gamma_max": 2}, "gamma_max is given, and tokens of the drafter 'classical-egag'"),
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
