"""Requests that share passes: each has the tokens that it has alone, whatever comes, goes or fails beside it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import BusyError, RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.text.grammar_rule import GrammarRule

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "mixed"]
KEEP = PrefixCacheConfig(max_cached_tokens=4096, min_prefix_length=1)


@pytest.fixture(scope="module")
def alone(branch_plan: Path) -> Runtime:
    """The same plan without cache or scheduler: what requests are compared with."""
    return Runtime.load(branch_plan, threads=1)


@pytest.fixture(scope="module", params=MODES)
def serving(branch_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    config = SchedulerConfig(mode=request.param, prefill_tokens=8)
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=KEEP, scheduler=config)
    yield runtime
    assert runtime.close(timeout=60)
    assert_nothing_is_left(runtime)
    with pytest.raises(BusyError, match="closed"):
        runtime.submit([1])


def assert_nothing_is_left(runtime: Runtime) -> None:
    """All places are free again, and nobody refers to the cache."""
    scheduler = runtime._scheduler
    assert scheduler is not None
    assert not scheduler._running
    assert not scheduler._by_place
    for engine in runtime.engines.loops:
        assert not engine.sequences
        assert len(engine._free) == runtime.manifest.target.branches
    if runtime.prefix_cache is not None:
        assert runtime.prefix_cache.in_use == 0
        runtime.prefix_cache.check()


@pytest.fixture(scope="module", params=[*MODES, "one branch"])
def any_serving(branch_plan: Path, toy_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Of a plan of one branch as well, which is served a request at a time."""
    one = request.param == "one branch"
    config = SchedulerConfig() if one else SchedulerConfig(mode=request.param)
    runtime = Runtime.load(toy_plan if one else branch_plan, threads=1, prefix_cache=KEEP, scheduler=config)
    yield runtime
    assert runtime.close(timeout=60)


OPTIONS = ("max_new_tokens", "temperature", "drafter", "seed", "stop")
REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 3), min_size=1, max_size=30)
        | st.integers(60, 130).map(lambda length: [1 + i * i % 3 for i in range(length)]),
        "max_new_tokens": st.integers(1, 30),
        "temperature": st.sampled_from([0.0, 0.8]),
        "drafter": st.sampled_from(DRAFTERS),
        "seed": st.integers(0, 2),
        "priority": st.integers(-1, 1),
        "pause": st.sampled_from([0, 0, 0, 0.002]),  # seconds before it is submitted
        "stop": st.sampled_from([[], [], ["a"], ["e", "\n"], ["in"]]),
        "cancel_after": st.none() | st.integers(0, 10),  # spans
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=24),
    tokens=st.sampled_from([48, 300, 4096]),
    overlap=st.booleans(),
)
@pytest.mark.parametrize("mode", MODES)
def test_every_request_has_the_tokens_that_it_has_alone(
    branch_plan: Path, alone: Runtime, mode: Any, requests: list[dict[str, Any]], tokens: int, overlap: bool
) -> None:
    """Any arrivals, lengths and cancellations; small pools evict all the time."""
    runtime = Runtime.load(
        branch_plan,
        threads=1,
        verify=False,
        prefix_cache=PrefixCacheConfig(max_cached_tokens=tokens, min_prefix_length=1),
        scheduler=SchedulerConfig(mode=mode, prefill_tokens=8, overlap=overlap),
    )
    handles = []
    for each in requests:
        time.sleep(each["pause"])
        options = {name: each[name] for name in (*OPTIONS, "priority")}
        handles.append(runtime.submit(each["prompt"], **options))
    for each, handle in zip(requests, handles, strict=True):
        if each["cancel_after"] == 0:
            handle.cancel()
        elif each["cancel_after"] is not None:
            for _, _span in zip(range(each["cancel_after"]), handle, strict=False):
                pass
            handle.cancel()
    for each, handle in zip(requests, handles, strict=True):
        options = {name: each[name] for name in OPTIONS}
        found, expected = handle.result(60), alone.generate(each["prompt"], **options)
        if found.finish_reason == "cancelled":
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert [token for span in handle for token in span.token_ids] == found.token_ids
        assert "".join(span.text for span in handle) == found.text
    assert runtime.close(timeout=60)
    assert_nothing_is_left(runtime)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_that_is_known_is_not_computed_again(serving: Runtime, alone: Runtime, drafter: str) -> None:
    """Copied in or in place; log-probabilities are the same bits."""
    prompt = [(41 * i) % 290 + 1 for i in range(70)]
    options = {"drafter": drafter, "max_new_tokens": 12, "logprobs": 3, "ignore_eos": True}
    others = [serving.submit([9, 8, *prompt[:30]], max_new_tokens=20) for _ in range(3)]
    serving.submit(prompt[:50], drafter=drafter, max_new_tokens=6, ignore_eos=True).result(60)
    stats = []
    for _ in range(3):
        found, expected = serving.submit(prompt, **options).result(60), alone.generate(prompt, **options)
        assert found.token_ids == expected.token_ids
        assert found.logprobs == expected.logprobs
        stats.append(found.stats)
    assert stats[0].reused_tokens >= 49
    assert stats[-1].reused_tokens >= 68
    for other in others:
        other.result(60)


@pytest.mark.parametrize("drafter", ["none", "bushy", "head"])
def test_a_cancel_at_any_step_leaves_nothing(serving: Runtime, alone: Runtime, drafter: str) -> None:
    prompt = [(13 * i) % 290 + 1 for i in range(60)]
    options = {"drafter": drafter, "max_new_tokens": 24, "ignore_eos": True}
    expected = alone.generate(prompt, **options).token_ids
    beside = serving.submit([7, 7, 7], max_new_tokens=120, ignore_eos=True, drafter="none")
    for step in range(25):
        handle = serving.submit([*prompt[:59], step + 1], **options)
        same = serving.submit(prompt, **options)
        for _ in zip(range(step), handle, strict=False):
            pass
        handle.cancel()
        assert handle.result(60).finish_reason in ("cancelled", "length")
        assert same.result(60).token_ids == expected
    assert beside.result(60).token_ids == alone.generate([7, 7, 7], max_new_tokens=120, ignore_eos=True).token_ids
    assert serving.scheduler_stats.running == 0


def test_spans_come_while_others_are_served(serving: Runtime) -> None:
    """A long prompt does not hold up who decodes: tokens come in the passes that compute it."""
    first = serving.submit([5, 6, 7], max_new_tokens=100, drafter="none", ignore_eos=True)
    next(iter(first))
    before = len(first._spans)
    second = serving.submit([(17 * i) % 299 + 1 for i in range(120)], max_new_tokens=1, drafter="none")
    second.result(60)
    passes = 120 // 8
    assert len(first._spans) - before >= passes - 2
    first.cancel()
    assert first.result(60).finish_reason == "cancelled"


def test_handles_are_awaited_and_iterated_in_an_event_loop(serving: Runtime, alone: Runtime) -> None:
    async def use() -> list[Any]:
        streamed = serving.submit([4, 5, 6], max_new_tokens=15, ignore_eos=True)
        waited = [serving.submit([4, 5, place], max_new_tokens=9, ignore_eos=True) for place in range(1, 6)]
        tokens = [token async for span in streamed for token in span.token_ids]
        return [tokens, *(result.token_ids for result in await asyncio.gather(*waited))]

    async def leave() -> list[Any]:
        """Whoever is cancelled, or waits no longer, ends the request."""

        async def read(handle: Any) -> None:
            async for _ in handle:
                await asyncio.sleep(0)

        def slow(_: object) -> None:
            time.sleep(0.01)

        handles = [serving.submit([4, 5, 6], max_new_tokens=150, ignore_eos=True, on_round=slow) for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handles[0], 0.02)
        reading = asyncio.create_task(read(handles[1]))
        await asyncio.sleep(0.02)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(handles[2]._whole()), 0.02)
        del reading
        while not all(handle.done for handle in handles):
            await asyncio.sleep(0.01)
        return [handle.result().finish_reason for handle in handles]

    assert asyncio.run(leave()) == ["cancelled", "cancelled", "length"]
    found = asyncio.run(use())
    expected = [alone.generate([4, 5, 6], max_new_tokens=15, ignore_eos=True).token_ids]
    expected += [alone.generate([4, 5, place], max_new_tokens=9, ignore_eos=True).token_ids for place in range(1, 6)]
    assert found == expected


def test_a_list_of_prompts(any_serving: Runtime, alone: Runtime) -> None:
    prompts: list[Any] = ["import os", "def main", [5, 6, 7]]
    expected = [alone.generate(prompt, max_new_tokens=7).token_ids for prompt in prompts]
    assert [found.token_ids for found in any_serving.generate(prompts, max_new_tokens=7)] == expected
    with pytest.raises(RequestError, match="Token id 999"):
        any_serving.generate([[5], [999]])


def test_who_matters_more_begins_first(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=1))
    order: list[int] = []
    admit = StepLoop.admit

    def noted(self: StepLoop, place: int, tokens: Any, request: Any) -> Any:
        order.append(tokens[0])
        return admit(self, place, tokens, request)

    monkeypatch.setattr(StepLoop, "admit", noted)
    first = runtime.submit([5], max_new_tokens=150, drafter="none", ignore_eos=True)
    next(iter(first))
    handles = [
        runtime.submit([token], max_new_tokens=1, priority=priority)
        for token, priority in ((10, -1), (11, 0), (12, 0), (13, 1))
    ]
    assert not first.done
    for handle in handles:
        handle.result(60)
    assert order[-5:] == [5, 13, 11, 12, 10]  # before them, its warm-up
    flooding = runtime.submit([5], max_new_tokens=150, drafter="none", ignore_eos=True, client="a")
    next(iter(flooding))
    handles = [
        runtime.submit([token], max_new_tokens=1, priority=priority, client=client)
        for token, priority, client in ((10, 0, "a"), (11, 0, "a"), (12, 9, "a"), (20, 0, "b"), (21, 0, "b"))
    ]
    assert not flooding.done
    for handle in handles:
        handle.result(60)
    assert order[-6:] == [5, 20, 21, 12, 10, 11]  # who has been granted less, and of one client the first that matters
    assert runtime.close(timeout=60)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"prompt": [5] * 161}, "context is 160"),
        ({"priority": "x"}, "priority is 'x'"),
        ({"deadline": 0}, "deadline is 0"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_at_once(serving: Runtime, own: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        serving.submit(**{"prompt": [5], **own})


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"max_running": 17}, "max_running is 17"),
        ({"prefill_tokens": 0}, "prefill_tokens is 0"),
        ({"prefill_tokens": 17}, "prefill_tokens is 17; the plan's passes take at most 16"),
        ({"mode": "x"}, "mode is 'x'; choose one of in-one-sequence, batching"),
        ({"max_waiting": None}, "max_waiting is None"),
        ({"max_waiting_per_client": True}, "max_waiting_per_client is True"),
        ({"overlap": 1}, "overlap is 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(branch_plan: Path, own: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Runtime.load(branch_plan, scheduler=SchedulerConfig(**own)).submit([5])


def test_requests_with_one_event_are_cancelled_one_by_one(serving: Runtime) -> None:
    shared = threading.Event()
    options = {"max_new_tokens": 60, "drafter": "none", "ignore_eos": True, "cancel": shared}
    first, second = (serving.submit([5, place], **options) for place in (1, 2))
    first.cancel()
    assert first.result(60).finish_reason in ("cancelled", "length")
    assert second.result(60).finish_reason == "length"
    assert not shared.is_set()
    third = serving.submit([5], **options | {"max_new_tokens": 150})
    next(iter(third))
    shared.set()
    assert third.result(60).finish_reason == "cancelled"


@pytest.mark.parametrize("drafter", ["chain", "bushy", "head"])
@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_as_good_behind_rows_of_others(branch_plan: Path, drafter: str, mode: Any) -> None:
    """Whatever ran in a row since: trees grow in rows that nobody has, and what they leave is worth nothing."""
    prompts = [[(19 * i + place) % 290 + 1 for i in range(40)] for place in range(6)]
    options = {"drafter": drafter, "max_new_tokens": 20, "ignore_eos": True, "auto_disable": False}

    def again(runtime: Runtime) -> list[tuple[list[int], int, int, int]]:
        found = [runtime.submit(prompt, **options).result(60) for prompt in prompts]
        return [(g.token_ids, g.stats.reused_tokens, g.stats.accepted, g.stats.drafted) for g in found]

    results = []
    for busy in (False, True):
        cache = PrefixCacheConfig(max_cached_tokens=4096)
        runtime = Runtime.load(branch_plan, threads=1, prefix_cache=cache, scheduler=SchedulerConfig(mode=mode))
        again(runtime)
        if busy:
            runtime.generate([[*prompt[:5], 3, 2, 1] for prompt in prompts] * 2, **options)
        results.append(again(runtime))
        assert runtime.close(timeout=60)
    assert results[0] == results[1]


def test_a_form_that_cannot_go_on_fails_its_request_alone(any_serving: Runtime, alone: Runtime) -> None:
    apply = GrammarRule.apply

    def fails(self: GrammarRule, logits: NDArray[np.float32], path: list[int]) -> None:
        if len(path) == 3:
            raise RequestError("There is no token.")
        apply(self, logits, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarRule, "apply", fails)
        other = any_serving.submit([5, 6], max_new_tokens=20, ignore_eos=True)
        handle = any_serving.submit([7], max_new_tokens=20, structured_outputs={"regex": "[ -~]*"})
        with pytest.raises(RequestError, match="There is no token"):
            handle.result(60)
        with pytest.raises(RequestError, match="There is no token"):
            list(handle)
    assert other.result(60).token_ids == alone.generate([5, 6], max_new_tokens=20, ignore_eos=True).token_ids


@pytest.mark.parametrize("plan", ["branch_plan", "toy_plan"])
def test_counts(plan: str, request: pytest.FixtureRequest) -> None:
    runtime = Runtime.load(request.getfixturevalue(plan), threads=1, prefix_cache=KEEP)
    results = runtime.generate([[5, 6, 7, 8]] * 3, max_new_tokens=6, ignore_eos=True)
    stats = runtime.scheduler_stats
    assert (stats.submitted, stats.finished, stats.failed, stats.waiting, stats.running) == (3, 3, 0, 0, 0)
    assert stats.new_tokens == 18
    assert stats.prompt_tokens == 12
    assert stats.reused_tokens == sum(result.stats.reused_tokens for result in results)
    assert stats.to_json()["tokens_per_verify"] == stats.new_tokens / stats.rounds
    assert stats.busy_ms >= stats.longest_round_ms > 0
    assert runtime.close(timeout=60)
