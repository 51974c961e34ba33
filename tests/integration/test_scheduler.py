"""Requests that share passes: each has the tokens that it has alone, while others come, end or fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import BusyError, PlanError, RequestError
from outrider.runtime.branch_request import MODES
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.options.options import Options
from outrider.runtime.rounds import accept
from outrider.runtime.sampling import TokenLogprob, logprobs
from outrider.runtime.step_loop import StepLoop
from tests.conftest import BuildOnce, call_before, made_once
from tests.integration.families import DRAFTERS as OF_FAMILIES
from tests.integration.families import TOYS, Toy, write_toy
from tests.integration.test_families import CACHE, on_device

DRAFTERS = ["none", "ngram", "short", "chain", "bushy", "head", "mixed"]
KEEP = PrefixCacheConfig(max_cached_tokens=4096, min_prefix_length=1)


@pytest.fixture(scope="module", params=MODES)
def serving(branch_plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    config = SchedulerConfig(mode=request.param, prefill_tokens=8)
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=KEEP, scheduler=config)
    yield runtime
    assert runtime.close(timeout=60)
    if runtime._scheduler is not None:  # it served something
        assert_nothing_is_left(runtime)
    with pytest.raises(BusyError, match="closed"):
        runtime.submit([1])


def assert_nothing_is_left(runtime: Runtime) -> None:
    """All places are free again, and nothing refers to the cache."""
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


def test_spans_come_while_others_are_served(serving: Runtime) -> None:
    """A long prompt does not stop others: tokens come in the passes that compute it."""
    first = serving.submit([5, 6, 7], max_new_tokens=100, drafter="none", ignore_eos=True)
    next(iter(first))
    before = len(first._spans)
    second = serving.submit([(17 * i) % 299 + 1 for i in range(120)], max_new_tokens=1, drafter="none")
    second.result(60)
    passes = 120 // 8
    assert len(first._spans) - before >= passes - 2
    first.cancel()
    assert first.result(60).finish_reason == "cancelled"


def test_handles_are_awaited_and_iterated_in_an_event_loop(serving: Runtime, branching: Runtime) -> None:
    async def use() -> list[Any]:
        streamed = serving.submit([4, 5, 6], max_new_tokens=15, ignore_eos=True)
        waited = [serving.submit([4, 5, place], max_new_tokens=9, ignore_eos=True) for place in range(1, 6)]
        tokens = [token async for span in streamed for token in span.token_ids]
        return [tokens, *(result.token_ids for result in await asyncio.gather(*waited))]

    async def leave() -> list[Any]:
        """A task that is cancelled, or stops waiting, ends the request."""

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
    asked = [([4, 5, 6], 15), *(([4, 5, place], 9) for place in range(1, 6))]
    expected = [branching.generate(tokens, max_new_tokens=new, ignore_eos=True).token_ids for tokens, new in asked]
    assert found == expected


def test_requests_of_higher_priority_begin_first(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=1))
    order: list[int] = []
    call_before(monkeypatch, StepLoop, "admit", lambda loop, place, tokens, request: order.append(tokens[0]))
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
    [({"prompt": [5] * 161}, "context is 160"), ({"priority": "x"}, "priority is 'x'"), ({"deadline": 0}, "is 0")],
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


__all__ = ["on_device"]

LARGE = 7  # a token whose embedding overflows when it is multiplied
OPTIONS = Options(
    max_new_tokens=20, ignore_eos=True, auto_disable=False, temperature=0.7, seed=3, logit_bias={LARGE: -100.0}
)
PROMPTS = [[20 + place, *range(30, 50 + place)] for place in range(4)]


@pytest.fixture(scope="module")
def recipe(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            changes = TOYS["granite"].changes | {"tie_word_embeddings": False}
            patch.setitem(TOYS, "overflow", Toy("granite", changes))
            write_toy("overflow", out, toy_recipe.parent / "target")
        weights = safetensors.torch.load_file(out / "target" / "model.safetensors")
        weights["model.embed_tokens.weight"][LARGE] = 2e38  # times 3
        safetensors.torch.save_file(weights, out / "target" / "model.safetensors", {"format": "pt"})

    return made_once(tmp_path_factory, "overflow", write) / "model.yaml"


@pytest.fixture(scope="module")
def plan(recipe: Path, built: BuildOnce) -> Path:
    return built("overflow/plan", (), recipe)


@pytest.fixture(scope="module", params=[*MODES, pytest.param("cuda", marks=pytest.mark.long), "tensorrt-rtx"])
def runtime(plan: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Of the CPU, which reads nothing that it hides, and of an emulated device: our kernels, and graphs with masks."""
    if request.param not in MODES:
        yield request.getfixturevalue("on_device")(request.param)
    else:
        with Runtime.load(plan, threads=1, prefix_cache=CACHE, scheduler=SchedulerConfig(mode=request.param)) as made:
            yield made


@pytest.fixture
def expected(runtime: Runtime) -> list[list[int]]:
    return [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in PROMPTS]


@pytest.mark.parametrize("place", [0, 10, -1])
def test_a_request_with_nan_logits_ends_alone(runtime: Runtime, expected: list[list[int]], place: int) -> None:
    spoilt = [*PROMPTS[0]]
    spoilt[place] = LARGE
    asked: list[tuple[list[int], Any]] = [
        (each, Options(drafter=drafter) | OPTIONS) for each, drafter in zip(PROMPTS, OF_FAMILIES, strict=True)
    ]
    for _ in range(2):
        handles = runtime.submit_all([asked[0], (spoilt, asked[1][1]), *asked[1:], (spoilt, asked[0][1])])
        for handle in (handles.pop(), handles.pop(1)):
            with pytest.raises(PlanError, match=r"NaN|not finite"):
                handle.result(60)
        assert [handle.result(60).token_ids for handle in handles] == expected


def test_prompts_that_are_computed_beside_nan_logits_are_computed_again(runtime: Runtime) -> None:
    """In chunks, before any sequence has a token that would show the fault; also if the faulty one is cancelled."""
    long = [[20 + place, *range(30, 100)] for place in range(2)]
    expected = [runtime.generate(each, drafter="none", **OPTIONS).token_ids for each in long]
    options = Options(drafter="chain") | OPTIONS
    for cancelled in (False, True):
        spoilt, *handles = runtime.submit_all([([LARGE, *long[0]], options), *((each, options) for each in long)])
        if cancelled:
            spoilt.cancel()
        else:
            with pytest.raises(PlanError, match=r"NaN|not finite"):
                spoilt.result(60)
        assert [handle.result(60).token_ids for handle in handles] == expected
    assert [runtime.generate(each, **options).token_ids for each in long] == expected


def test_infinite_logits_end_a_request_for_log_probabilities_alone(
    runtime: Runtime, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(logits: np.ndarray, token: int, top: int) -> TokenLogprob:
        return logprobs(np.where(np.arange(len(logits)) == token, np.float32(np.inf), logits), token, top)

    monkeypatch.setattr(accept, "logprobs", refuse)
    faulty, *handles = runtime.submit_all(
        [(PROMPTS[0], Options(logprobs=1) | OPTIONS), *((each, OPTIONS) for each in PROMPTS)]
    )
    with pytest.raises(PlanError, match="no distribution: their maximum is inf"):
        faulty.result(60)
    assert [handle.result(60).token_ids for handle in handles] == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_draft_that_is_at_fault_changes_no_token(
    runtime: Runtime, expected: list[list[int]], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafting, "draft_on_host", lambda *given: Draft([LARGE], np.array([0])))
    asked = Options(drafter="ngram") | OPTIONS
    handles = runtime.submit_all([(each, asked) for each in PROMPTS]) if together else []
    found = [each.result(60) for each in handles] or [runtime.generate(each, **asked) for each in PROMPTS]
    assert [each.token_ids for each in found] == expected


def test_a_session_continues_after_nan_logits(runtime: Runtime) -> None:
    session = runtime.session()
    with pytest.raises(PlanError, match="NaN"):
        session.generate([*PROMPTS[0], LARGE], drafter="chain", **OPTIONS)
    session.truncate(len(PROMPTS[0]))
    found = session.generate(PROMPTS[1], drafter="chain", **OPTIONS)
    assert found.token_ids == runtime.generate(PROMPTS[0] + PROMPTS[1], drafter="none", **OPTIONS).token_ids
    session.close()


@pytest.mark.long
@pytest.mark.parametrize("batching", ["true", "false"])
def test_a_plan_serves_128_branches(built: BuildOnce, batching: str) -> None:
    capacity = f"{{context: 256, prefill_chunk: 16, branches: 128, batching: {batching}}}"
    runtime = Runtime.load(built(f"many-{batching}", [f"capacity={capacity}"]), threads=1)
    prompts = [[7 + place, 3, 1 + place % 5] for place in range(128)]
    for drafter in ("none", "ngram", "head", "chain"):
        options = Options(max_new_tokens=8, temperature=0.8, seed=3, ignore_eos=True, drafter=drafter)
        handles = runtime.submit_all([(prompt, options) for prompt in prompts])
        found = [handle.result(120).token_ids for handle in handles]
        assert found[::16] == [runtime.generate(prompt, **options).token_ids for prompt in prompts[::16]]
