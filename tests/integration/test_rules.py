"""Rules over logits: the tokens of plain decoding by the same rules, whatever drafts, and whoever shares the passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import Runtime, SchedulerConfig
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.generation import Span
from outrider.runtime.options.options import Options
from outrider.runtime.text.rules import LogitsRule
from tests.conftest import REJECTING, TOY_DRAFTERS
from tests.integration.shifting_rule import Shifting

PROMPTS = [[(37 * i + place) % 299 + 1 for i in range(20)] for place in range(4)]
DRAFT_OFTEN = ["chain", "sure", "bushy", "head", "mixed"]


class Stuck(LogitsRule):
    """Allows no token after so many."""

    def __init__(self, count: int) -> None:
        self._count = count

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        if len(path) >= self._count:
            raise RequestError("There is no token.")


class Spelled(LogitsRule):
    """Allows one text alone, and knows it; of `wrong`, what it says is forced is not what it allows."""

    def __init__(self, tokens: Sequence[int], *, wrong: bool = False) -> None:
        self._tokens, self._wrong = list(tokens), wrong

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        kept = logits[self._tokens[len(path)]]
        logits[:] = -np.inf
        logits[self._tokens[len(path)]] = kept

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        return [7] * limit if self._wrong else self._tokens[len(path) :]


class Nothing(LogitsRule):
    """Excludes everything."""

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        logits[:] = -np.inf


def asked(**more: Any) -> Options:
    found = {
        "max_new_tokens": 40,
        "ignore_eos": True,
        "auto_disable": False,
        "constraint": Shifting(),
        "seed": 0,
        **more,
    }
    return Options(**found)  # type: ignore[typeddict-item]


def test_a_rule_changes_the_logits_that_a_token_is_chosen_from(toy: Runtime) -> None:
    """The target's choice of each token, worked out from the logits that it gives without rules."""
    found = toy.generate(PROMPTS[0], drafter="none", **asked(max_new_tokens=10)).token_ids
    free = toy.generate(PROMPTS[0], drafter="none", **asked(max_new_tokens=10, constraint=None)).token_ids
    assert found != free
    for count, token in enumerate(found):
        session = toy.session()
        next(session.stream(PROMPTS[0] + found[:count], drafter="none", max_new_tokens=1, ignore_eos=True))
        row = session.step_logits(0).copy()
        Shifting().apply(row, found[:count])
        assert token == int(row.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
def test_same_tokens_with_any_drafter(toy: Runtime, drafter: str, temperature: float) -> None:
    accepted = drafted = 0
    for seed, prompt in enumerate(PROMPTS):
        options = asked(temperature=temperature, seed=seed)
        expected = toy.generate(prompt, drafter="none", **options)
        found = toy.generate(prompt, drafter=drafter, **options)
        assert found.token_ids == expected.token_ids
        accepted, drafted = accepted + found.stats.accepted, drafted + found.stats.drafted
    assert drafted > 0
    assert accepted > 0 or drafter not in DRAFT_OFTEN


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
def test_log_probabilities_are_the_models_own(toy: Runtime, drafter: str) -> None:
    options = asked(logprobs=2, max_new_tokens=12)
    found = toy.generate(PROMPTS[0], drafter=drafter, **options)
    for count, entry in enumerate(found.logprobs):
        prompt = PROMPTS[0] + found.token_ids[:count]
        (free,) = toy.generate(prompt, drafter="none", max_new_tokens=1, logprobs=2, ignore_eos=True).logprobs
        assert entry.top == free.top
    assert any(entry.token_id != entry.top[0][0] for entry in found.logprobs)


@pytest.fixture(scope="module", params=["in-one-sequence", "batching"])
def serving(everything_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = Runtime.load(everything_plan, threads=1, scheduler=SchedulerConfig(mode=request.param))
    yield runtime
    runtime.close(timeout=60)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_tokens_in_company(serving: Runtime, temperature: float) -> None:
    """Beside sequences with other drafters, with rules and without."""
    drafters = ["none", *TOY_DRAFTERS]
    both = [
        (PROMPTS[place % 4], asked(drafter=drafter, temperature=temperature, constraint=rule))
        for rule in (Shifting(), None)
        for place, drafter in enumerate(drafters)
    ]
    found = [handle.result(120) for handle in serving.submit_all(both)]
    for (prompt, options), each in zip(both, found, strict=True):
        assert each.token_ids == serving.generate(prompt, **options | Options(drafter="none")).token_ids
    ruled = dict(zip(drafters, found, strict=False))
    assert all(ruled[drafter].stats.accepted > 0 for drafter in ("chain", "sure", "bushy"))


@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
def test_same_tokens_in_branches(everything: Runtime, mode: Any) -> None:
    prefix, drafters = PROMPTS[0], ["none", "chain", "head", "ngram", "bushy"]
    branches = [
        {"prompt": [place + 1], "stream_id": 0, **asked(drafter=drafter, constraint=rule)}
        for rule in (Shifting(), None)
        for place, drafter in enumerate(drafters)
    ]
    found = everything.generate_branches(prefix, branches, mode=mode)
    for branch, each in zip(branches, found, strict=True):
        own = {name: value for name, value in branch.items() if name != "prompt"} | {"drafter": "none"}
        assert each.token_ids == everything.generate([*prefix, *branch["prompt"]], **own).token_ids


@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
def test_a_session_goes_on_with_other_rules(toy: Runtime, drafter: str) -> None:
    turns: list[Options] = [asked(), asked(constraint=None), asked(temperature=1.0, seed=3), asked()]
    with toy.session() as session, toy.session() as plain:
        for place, options in enumerate(turns):
            own = options | Options(max_new_tokens=12)
            expected = plain.generate([place + 1], drafter="none", **own)
            assert session.generate([place + 1], drafter=drafter, **own).token_ids == expected.token_ids


@pytest.mark.parametrize("drafter", REJECTING)
def test_rejection(serving: Runtime, drafter: str) -> None:
    """The rules hold at any temperature; greedy tokens are those of plain decoding; company changes nothing."""
    options = asked(drafter=drafter)
    expected = serving.generate(PROMPTS[0], **options | Options(drafter="none"))
    found = serving.generate(PROMPTS[0], **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted > 0 or drafter in ("classical-head", "classical-block")  # random, so never right
    both = [(prompt, asked(drafter=drafter, temperature=1.0, seed=9)) for prompt in PROMPTS]
    handles = serving.submit_all(both)
    for (prompt, own), handle in zip(both, handles, strict=True):
        tokens = handle.result(120).token_ids
        assert tokens == serving.generate(prompt, **own).token_ids
        for count, token in enumerate(tokens):
            row = np.zeros(300, np.float32)
            Shifting().apply(row, tokens[:count])
            assert np.isfinite(row[token])


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS, *REJECTING])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_where_no_token_may_follow_the_generation_ends_behind_those_before(
    serving: Runtime, drafter: str, count: int
) -> None:
    free = serving.generate(PROMPTS[1], **asked(drafter="none", constraint=None)).token_ids
    options = asked(drafter=drafter, constraint=Stuck(count))
    with serving.session() as session:
        assert _tokens_until_stuck(session.stream(PROMPTS[1], **options)) == free[:count]
        rest = session.generate([], **asked(drafter=drafter, constraint=None, max_new_tokens=10))
        assert rest.token_ids == free[count : count + 10]
    handles = serving.submit_all([(PROMPTS[1], options), (PROMPTS[1], asked(drafter=drafter, constraint=None))])
    assert _tokens_until_stuck(handles[0]) == free[:count]
    assert handles[1].result(60).token_ids == free


def _tokens_until_stuck(spans: Iterable[Span]) -> list[int]:
    found: list[int] = []
    with pytest.raises(RequestError, match=r"There is no token\."):
        found.extend(token for span in spans for token in span.token_ids)
    return found


@pytest.mark.parametrize("drafter", ["none", "chain", "classical"])
def test_rules_that_exclude_everything_are_an_error(serving: Runtime, drafter: str) -> None:
    with pytest.raises(RequestError, match="exclude all tokens of the vocabulary"):
        serving.generate(PROMPTS[0], **asked(drafter=drafter, constraint=Nothing()))


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("drafter", [*TOY_DRAFTERS, *REJECTING])
def test_tokens_that_a_rule_forces_are_drafted(serving: Runtime, drafter: str, wrong: bool) -> None:
    spelled = [(11 * place) % 290 + 1 for place in range(30)]
    options = asked(drafter=drafter, constraint=Spelled(spelled, wrong=wrong), max_new_tokens=30)
    alone = serving.generate(PROMPTS[0], **options)
    assert alone.token_ids == spelled
    assert (alone.stats.rounds < 8) == (not wrong and drafter not in REJECTING)
    free = asked(drafter=drafter, constraint=None)
    found = [handle.result(60) for handle in serving.submit_all([(PROMPTS[0], options), (PROMPTS[1], free)] * 2)]
    assert [each.token_ids for each in found[::2]] == [spelled] * 2
    expected = serving.generate(PROMPTS[1], **free).token_ids
    assert [each.token_ids for each in found[1::2]] == [expected] * 2
    rest = serving.generate(PROMPTS[0], **asked(drafter="none", constraint=Spelled(spelled), max_new_tokens=30))
    assert rest.stats.rounds == 30  # plain decoding stays plain


@pytest.mark.parametrize("drafter", ["none", "chain", "bushy"])
def test_kv_that_is_not_finite_is_computed_again(toy: Runtime, drafter: str) -> None:
    session, other = toy.session(), toy.session()
    for each in (session, other):
        each.generate(PROMPTS[0], **asked(drafter=drafter, max_new_tokens=10))
    session.buffers.array(names.TARGET, names.KV)[:] = np.nan
    assert (
        session.generate([5], **asked(drafter=drafter)).token_ids
        == other.generate([5], **asked(drafter=drafter)).token_ids
    )
