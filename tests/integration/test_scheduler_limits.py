"""Queues, deadlines and ends of a scheduler, and plans of one branch, which serve a request at a time."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import BusyError, RequestError, Runtime, SchedulerConfig
from outrider.plans.errors import PlanError
from outrider.runtime.execution.program import Program
from outrider.runtime.step_loop import StepLoop
from tests.conftest import call_before
from tests.integration.served import wait_until
from tests.integration.test_scheduler import KEEP, assert_nothing_is_left


def test_a_client_has_a_share_of_the_queue(branch_plan: Path) -> None:
    config = SchedulerConfig(max_running=1, max_waiting=4, max_waiting_per_client=2)
    runtime = Runtime.load(branch_plan, threads=1, scheduler=config)
    running = runtime.submit([5], max_new_tokens=150, drafter="none", ignore_eos=True)
    next(iter(running))
    taken = [runtime.submit([6], client="a") for _ in range(2)]
    with pytest.raises(BusyError, match="Too many requests of this client wait: 2 already, and its share of the queue"):
        runtime.submit([7], client="a")
    taken.append(runtime.submit([7], client="b"))
    with pytest.raises(BusyError, match="The queue is full: 3 requests wait already, and 2 more are not taken now"):
        runtime.submit_all([([7], {}), ([8], {})], client="c")
    assert runtime.scheduler_stats.waiting == 3  # of several, all are taken or none
    with pytest.raises(RequestError, match="4 requests are made at once, and at most 3 can be"):
        runtime.submit_all([([7], {})] * 4, client="c")
    taken.append(runtime.submit([7]))
    with pytest.raises(BusyError, match="The queue is full: 4 requests"):
        runtime.submit([8])
    assert runtime.scheduler_stats.refused == 4
    running.cancel()
    assert runtime.close(timeout=60)
    assert all(handle.done for handle in taken)


def test_requests_that_can_begin_at_once_need_no_queue(branch_plan: Path) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=3, max_waiting=1))
    handles = runtime.submit_all([([5, place], {"max_new_tokens": 2}) for place in range(4)])
    assert [handle.result(60).stats.new_tokens > 0 for handle in handles] == [True] * 4
    assert runtime.close(timeout=60)


def test_a_list_may_be_longer_than_the_queue(branch_plan: Path, branching: Runtime) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=2, max_waiting=2))
    prompts = [[5, place] for place in range(1, 12)]
    cancel = threading.Event()
    for _ in range(2):  # the caller's event stays as it was
        found = runtime.generate(prompts, max_new_tokens=4, cancel=cancel, ignore_eos=True)
        expected = [branching.generate(prompt, max_new_tokens=4, ignore_eos=True).token_ids for prompt in prompts]
        assert [each.token_ids for each in found] == expected
    assert not cancel.is_set()
    cancel.set()
    assert {each.finish_reason.value for each in runtime.generate(prompts, cancel=cancel)} == {"cancelled"}
    assert runtime.close(timeout=60)


def test_a_runtime_may_be_closed_before_its_first_request(branch_plan: Path) -> None:
    with Runtime.load(branch_plan, threads=1) as runtime:
        session = runtime.session()
        handle = runtime.submit([5], max_new_tokens=4)
    assert handle.done
    with pytest.raises(TypeError, match="of its process"):
        pickle.dumps(runtime)
    assert session.generate([5], max_new_tokens=1).token_ids  # what is open continues
    for ask in (runtime.submit, runtime.generate, runtime.stream, runtime.beam_search, runtime.generate_branches):
        with pytest.raises(BusyError, match="closed"):
            ask([5])
    with pytest.raises(BusyError, match="closed"):
        runtime.session()
    session.close()


def test_without_a_seed_texts_differ_and_the_result_has_it(branching: Runtime) -> None:
    found = [branching.generate([5], max_new_tokens=12, temperature=1.0, ignore_eos=True) for _ in range(3)]
    found += branching.generate_branches([5, 6], n=2, max_new_tokens=12, temperature=1.0, ignore_eos=True)
    assert len({tuple(each.token_ids) for each in found}) == 5
    assert found[3].seed == found[4].seed
    again = branching.generate([5], max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=found[0].seed)
    assert again.token_ids == found[0].token_ids
    with pytest.raises(RequestError, match="generated holds tokens that were drawn, and there is no seed"):
        branching.generate([5], max_new_tokens=12, temperature=1.0, generated=[3])


@pytest.mark.parametrize("plan", ["branch_plan", "toy_plan"])
@pytest.mark.parametrize("error", [PlanError, SystemExit])
def test_a_round_that_fails_fails_those_in_it_alone(
    plan: str, branching: Runtime, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    runtime = Runtime.load(request.getfixturevalue(plan), threads=1, prefix_cache=KEEP)
    expected = branching.generate([5, 6], max_new_tokens=9, ignore_eos=True).token_ids
    assert runtime.submit([5, 6], max_new_tokens=9, ignore_eos=True).result(60).token_ids == expected
    decodes = iter(range(100))

    def fail(program: Program) -> None:
        if program.name == "decode" and next(decodes) == 3:
            raise error("the engine fell over")

    with pytest.MonkeyPatch.context() as patch:
        call_before(patch, Program, "run", fail)
        broken = runtime.submit([7, 8], max_new_tokens=50, drafter="none", ignore_eos=True)
        with pytest.raises(PlanError, match="fell over"):
            broken.result(60)
        assert len(list(broken._spans)) > 0
    for _ in range(2):
        assert runtime.submit([5, 6], max_new_tokens=9, ignore_eos=True).result(60).token_ids == expected
    assert runtime.scheduler_stats.failed == 1
    assert runtime.close(timeout=60)
    assert_nothing_is_left(runtime)


def test_its_thread_ends_when_there_is_nothing_to_do(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.runtime.scheduler._IDLE", 0.05)
    runtime = Runtime.load(branch_plan, threads=1)
    for _ in range(3):
        expected = runtime.generate([5, 6], max_new_tokens=3).token_ids
        assert runtime.submit([5, 6], max_new_tokens=3).result(60).token_ids == expected
        wait_until(lambda: runtime._scheduler is None or runtime._scheduler._thread is None)


@pytest.mark.parametrize("new", [2, 140])
def test_a_program_may_end_while_requests_run(branch_plan: Path, new: int) -> None:
    program = (
        "import sys; from outrider import Runtime; runtime = Runtime.load(sys.argv[1], threads=1)\n"
        f"handle = runtime.submit([5], max_new_tokens={new}, drafter='none', ignore_eos=True)\n"
        "print(len(next(iter(handle)).token_ids))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(branch_plan)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


PROMPT = [(37 * i) % 299 + 1 for i in range(50)]  # four chunks


@pytest.fixture(scope="module")
def single(toy_plan: Path) -> Iterator[Runtime]:
    runtime = Runtime.load(toy_plan, threads=1)
    yield runtime
    assert runtime.close(timeout=60)
    assert len(runtime.engines.loops) == 1  # all requests had the engine that loading made
    with pytest.raises(BusyError, match="closed"):
        runtime.submit([1])


class Gate:
    """Holds every pass until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passes, self.reached = threading.Semaphore(0), threading.Event()
        call_before(monkeypatch, StepLoop, "step", self._wait)

    def _wait(self, *_: object) -> None:
        self.reached.set()
        assert self._passes.acquire(timeout=60)

    def let(self, passes: int) -> None:
        self._passes.release(passes)

    def open(self) -> None:
        self._passes.release(10_000)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


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


def test_requests_run_one_after_another(single: Runtime, toy: Runtime, gate: Gate) -> None:
    options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True, "drafter": "none"}
    first = single.submit([5, 1], **options)
    assert gate.reached.wait(60)
    second, third = (single.submit([5, place], priority=place, **options) for place in (2, 3))
    stats = single.scheduler_stats
    assert (stats.running, stats.waiting) == (1, 2)
    gate.open()
    for place, handle in enumerate((first, second, third), 1):
        assert handle.result(60).token_ids == toy.generate([5, place], **options).token_ids
    assert third.result().stats.queued_ms < second.result().stats.queued_ms  # by its priority


def test_cancelling_in_the_queue_in_a_prompt_and_in_flight(single: Runtime, toy: Runtime, gate: Gate) -> None:
    options: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True, "drafter": "none"}
    event = threading.Event()
    running = single.submit(PROMPT, **options)
    assert gate.reached.wait(60)
    queued, other = single.submit([5], **options), single.submit([6], cancel=event, **options)
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
    again, expected = single.submit(PROMPT, **options), toy.generate(PROMPT, **options).token_ids
    next(iter(again))
    again.cancel()
    found = again.result(60).token_ids
    assert found == expected[: len(found)]
    assert single.submit(PROMPT, **options).result(60).token_ids == expected


def test_a_deadline_ends_a_request_in_the_queue_in_a_prompt_and_in_flight(
    single: Runtime, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    for module in ("scheduler", "request_queue"):
        monkeypatch.setattr(f"outrider.runtime.{module}.monotonic", lambda: now[0])
    running = single.submit(PROMPT, deadline=10.0, ignore_eos=True)
    assert gate.reached.wait(60)
    queued = single.submit([5], deadline=5.0)
    now[0] = 6.0
    gate.let(1)
    assert queued.result(60).finish_reason == "deadline"  # while the other's prompt is computed
    now[0] = 11.0
    gate.let(2)
    assert (running.result(60).finish_reason, running.result().token_ids) == ("deadline", [])
    late = single.submit([5], deadline=10.0, max_new_tokens=100, drafter="none", ignore_eos=True)
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
