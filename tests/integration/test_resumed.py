"""A request that continues after what it has given elsewhere has the tokens and the text of one that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import Generation, PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import RequestError
from outrider.runtime.generation import FinishReason, Span

PROMPT = "def main(x): return"
REGEX = {"regex": r"[a-z ]{4,40}=[0-9]{1,8};"}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "temperature": 0.6}
    | {"seed": 0},
    "structured": {"structured_outputs": REGEX, "temperature": 1.0, "seed": 5},
    "stop": {"stop": ["return", "\n"], "min_tokens": 5, "temperature": 1.0, "seed": 3},
    "logprobs": {"logprobs": 2, "temperature": 0.7, "seed": 0},
    "bad words": {"bad_words": ["return", "x"], "temperature": 1.0, "seed": 9},
}
DRAFTERS = ["none", "bushy", "head", "mixed"]


@pytest.fixture(scope="module")
def whole(branch_plan: Path) -> Runtime:
    """What a request that never stopped gives."""
    return Runtime.load(branch_plan, threads=1)


@pytest.fixture(scope="module")
def replica(branch_plan: Path) -> Iterator[Runtime]:
    """Another copy of the plan, with a cache that earlier requests have filled."""
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))
    yield runtime
    assert runtime.close(timeout=60)


def cuts(spans: list[Span]) -> list[tuple[list[int], str]]:
    """What was given of a request at each moment between two of its tokens that ends a span."""
    found, tokens, text = [], list[int](), ""
    for span in spans[:-1]:
        tokens, text = [*tokens, *span.token_ids], text + span.text
        if tokens:
            found.append((tokens, text))
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_continues_with_the_same_tokens_and_text(whole: Runtime, replica: Runtime, name: str, drafter: str) -> None:
    options = {"max_new_tokens": 24, **OPTIONS[name]}
    stream = whole.stream(PROMPT, **options, drafter="ngram")
    spans = list(stream)
    expected = stream.result
    every = cuts(spans)
    assert every
    for given, shown in every[:: max(1, len(every) // 4)]:
        handle = replica.submit(PROMPT, **options, drafter=drafter, generated=given)
        later = list(handle)
        result = handle.result()
        assert [*given, *(token for span in later for token in span.token_ids)] == expected.token_ids
        assert shown + "".join(span.text for span in later) == expected.text
        assert_same(result, expected, len(given))


def assert_same(result: Generation, expected: Generation, given: int) -> None:
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
    assert result.finish_reason is expected.finish_reason
    assert result.logprobs == expected.logprobs[given:]
    assert result.stats.prompt_tokens == expected.stats.prompt_tokens
    assert result.stats.resumed_tokens == given
    assert result.stats.resumed_tokens + result.stats.new_tokens == expected.stats.new_tokens


def test_its_tokens_are_its_result_at_the_deadline(branch_plan: Path, whole: Runtime) -> None:
    expected = whole.generate(PROMPT, max_new_tokens=12, temperature=0.8, seed=2)
    replica = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=1))
    others = [replica.submit(PROMPT, max_new_tokens=140, ignore_eos=True) for _ in range(3)]
    late = replica.submit(
        PROMPT, max_new_tokens=30, stop=[expected.text[-1] + "\0"], generated=expected.token_ids, deadline=0.001
    )
    found = late.result(timeout=60)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert found.finish_reason is FinishReason.DEADLINE
    assert found.stats.resumed_tokens == 12
    assert "".join(span.text for span in late) == expected.text[-1:]  # held back until then
    assert all(len(other.result(timeout=60).token_ids) == 140 for other in others)
    assert replica.close(timeout=60)


def test_sessions_continue_as_well(whole: Runtime) -> None:
    expected = whole.generate(PROMPT, max_new_tokens=12, temperature=0.8, seed=2)
    session = whole.session()
    found = session.generate(PROMPT, max_new_tokens=12, temperature=0.8, seed=2, generated=expected.token_ids[:5])
    assert_same(found, expected, 5)
    assert session.token_ids[-12:] == expected.token_ids
    again = session.generate(" and", max_new_tokens=4)
    assert again.token_ids == whole.generate([*session.token_ids[:-4]], max_new_tokens=4).token_ids


def test_requests_that_continue_share_passes_with_those_that_begin(whole: Runtime, replica: Runtime) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0}
    expected = [whole.generate(PROMPT, **options, seed=seed) for seed in range(6)]
    handles = [
        replica.submit(PROMPT, **options, seed=seed, generated=each.token_ids[: 3 * (seed % 3)])
        for seed, each in enumerate(expected)
    ]
    for seed, (handle, each) in enumerate(zip(handles, expected, strict=True)):
        assert_same(handle.result(timeout=60), each, 3 * (seed % 3))


def test_refuses_tokens_that_cannot_be_continued(whole: Runtime) -> None:
    text = whole.generate(PROMPT, max_new_tokens=8)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"generated": [1, 2], "max_new_tokens": 2}, "generated holds 2 tokens, and max_new_tokens is 2"),
        ({"generated": [1, 7], "eos_token_ids": [7]}, "generated holds an end token"),
        ({"generated": [5] * 150, "max_new_tokens": 200}, "fill the plan's context of 160"),
        ({"generated": text.token_ids, "stop": [text.text[1:3]]}, "generated holds the stop string"),
    ]
    for options, message in wrong:
        for call in (whole.generate, whole.submit, whole.session().generate):
            with pytest.raises(RequestError, match=message):
                call(PROMPT, **options)
    with pytest.raises(RequestError, match="Branch 0: generated is of a request that continues alone"):
        whole.generate_branches(PROMPT, n=2, generated=[1])
