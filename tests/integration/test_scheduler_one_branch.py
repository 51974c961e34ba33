"""Plans of one branch are served too, a request at a time, each with the tokens that `generate` gives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import BusyError, RequestError, Runtime, SchedulerConfig
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from outrider.runtime.step_loop import StepLoop
from tests.conftest import TOY_DRAFTERS

PROMPT = [(37 * i) % 299 + 1 for i in range(50)]  # four chunks


@pytest.fixture(scope="module")
def serving(toy_plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(toy_plan, threads=1)
    yield runtime
    assert runtime.close(timeout=60)
    assert len(runtime.engines.loops) == 1  # all requests had the engine that loading made
    with pytest.raises(BusyError, match="closed"):
        runtime.submit([1])


class Gate:
    """Holds what runs before each pass, until it lets some through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passes, self.reached = threading.Semaphore(0), threading.Event()
        step = StepLoop.step

        def gated(engine: StepLoop, *arguments: Any) -> Any:
            self.reached.set()
            assert self._passes.acquire(timeout=60)
            return step(engine, *arguments)

        monkeypatch.setattr(StepLoop, "step", gated)

    def let(self, passes: int) -> None:
        self._passes.release(passes)

    def open(self) -> None:
        self._passes.release(10_000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_tokens_are_those_of_generate(serving: Runtime, toy: Runtime, drafter: str, temperature: float) -> None:
    options: dict[str, Any] = {"drafter": drafter, "temperature": temperature, "seed": 3, "max_new_tokens": 30}
    expected = toy.generate(PROMPT, logprobs=2, **options)
    handle = serving.submit(PROMPT, logprobs=2, **options)
    found = handle.result(60)
    assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    assert found.finish_reason == expected.finish_reason
    assert [token for span in handle for token in span.token_ids] == found.token_ids
    assert "".join(span.text for span in handle) == found.text


def test_tokens_of_rejection_are_those_of_generate(toy_recipe: Path, tmp_path: Path) -> None:
    chain = "drafters=[{name: chain, kind: model, checkpoint: drafter, gamma: 4, acceptance: rejection}]"
    build(load_recipe(toy_recipe, [chain]), toy_recipe, tmp_path / "plan")
    runtime = Runtime.load(tmp_path / "plan", threads=1)
    for seed in range(3):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": 30, "ignore_eos": True}
        expected = runtime.generate(PROMPT, **options)
        found = runtime.submit(PROMPT, **options).result(60)
        assert found.token_ids == expected.token_ids
        assert found.stats.drafted == expected.stats.drafted > 0
    assert runtime.close(timeout=60)


@pytest.mark.parametrize("mode", ["lossless", "lossy"])
@pytest.mark.usefixtures("run_ahead")
def test_partial_kv_and_tentative_spans(long_plan: Path, long: Runtime, mode: Any) -> None:
    runtime = Runtime.load(long_plan, threads=1)
    options: dict[str, Any] = {"partial_kv": mode, "max_new_tokens": 40, "ignore_eos": True, "drafter": "none"}
    expected = long.generate(PROMPT, **options)
    handle = runtime.submit(PROMPT, tentative=mode == "lossless", **options)
    assert handle.result(60).token_ids == expected.token_ids
    assert [token for span in handle if not span.tentative for token in span.token_ids] == expected.token_ids
    assert any(span.tentative for span in handle) == (mode == "lossless")
    assert runtime.scheduler_stats.new_tokens == 40
    assert runtime.close(timeout=60)


def test_requests_run_one_after_another(serving: Runtime, toy: Runtime, gate: Gate) -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True, "drafter": "none"}
    first = serving.submit([5, 1], **options)
    assert gate.reached.wait(60)
    second, third = (serving.submit([5, place], priority=place, **options) for place in (2, 3))
    stats = serving.scheduler_stats
    assert (stats.running, stats.waiting) == (1, 2)
    gate.open()
    for place, handle in enumerate((first, second, third), 1):
        assert handle.result(60).token_ids == toy.generate([5, place], **options).token_ids
    assert third.result().stats.queued_ms < second.result().stats.queued_ms  # it matters more


def test_cancelling_in_the_queue_in_a_prompt_and_in_flight(serving: Runtime, toy: Runtime, gate: Gate) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "drafter": "none"}
    event = threading.Event()
    running = serving.submit(PROMPT, **options)
    assert gate.reached.wait(60)
    queued, other = serving.submit([5], **options), serving.submit([6], cancel=event, **options)
    queued.cancel()
    event.set()
    gate.let(1)  # one chunk of the prompt that runs
    assert queued.result(60).finish_reason == "cancelled"
    assert other.result(60).finish_reason == "cancelled"
    assert not running.done
    running.cancel()
    gate.open()
    ended = running.result(60)
    assert (ended.finish_reason, ended.token_ids, ended.stats.prefill_passes) == ("cancelled", [], 1)
    again, expected = serving.submit(PROMPT, **options), toy.generate(PROMPT, **options).token_ids
    next(iter(again))
    again.cancel()
    found = again.result(60).token_ids
    assert found == expected[: len(found)]
    assert serving.submit(PROMPT, **options).result(60).token_ids == expected


def test_a_deadline_ends_a_request_in_the_queue_in_a_prompt_and_in_flight(
    serving: Runtime, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("outrider.runtime.scheduler.monotonic", lambda: now[0])
    running = serving.submit(PROMPT, deadline=10.0, ignore_eos=True)
    assert gate.reached.wait(60)
    queued = serving.submit([5], deadline=5.0)
    now[0] = 6.0
    gate.let(1)
    assert queued.result(60).finish_reason == "deadline"  # while the other's prompt is computed
    now[0] = 11.0
    gate.let(2)
    assert (running.result(60).finish_reason, running.result().token_ids) == ("deadline", [])
    late = serving.submit([5], deadline=10.0, max_new_tokens=100, drafter="none", ignore_eos=True)
    gate.let(3)
    for _ in zip(range(3), late, strict=False):
        pass
    now[0] = 30.0
    gate.open()
    found = late.result(60)
    assert found.finish_reason == "deadline"
    assert 3 <= len(found.token_ids) <= 4


def test_what_a_plan_of_one_branch_cannot_do_is_refused(toy_plan: Path) -> None:
    with pytest.raises(RequestError, match="max_running is 2; the plan serves at most 1"):
        Runtime.load(toy_plan, scheduler=SchedulerConfig(max_running=2)).submit([5])
    with pytest.raises(RequestError, match=r"capacity\.batching"):
        Runtime.load(toy_plan, scheduler=SchedulerConfig(mode="batching")).start()


def test_closing_without_draining_cancels(toy_plan: Path, gate: Gate) -> None:
    runtime = Runtime.load(toy_plan, threads=1)
    handles = [runtime.submit(PROMPT, ignore_eos=True) for _ in range(3)]
    assert gate.reached.wait(60)
    assert not runtime.close(drain=False, timeout=0.01)
    gate.open()
    assert {handle.result(60).finish_reason.value for handle in handles} == {"cancelled"}
    assert runtime.close(timeout=60)
