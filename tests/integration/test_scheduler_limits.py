"""Queues, deadlines and ends of a scheduler: what is refused, what fails, and that nothing is left behind."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from outrider import Runtime, SchedulerConfig
from outrider.plans.errors import BusyError, PlanError, RequestError
from outrider.runtime.execution.program import Program
from tests.integration.served import wait_until
from tests.integration.test_scheduler import KEEP, assert_nothing_is_left


@pytest.fixture(scope="module")
def alone(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


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


def test_as_many_as_can_begin_at_once_need_no_queue(branch_plan: Path) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=3, max_waiting=1))
    handles = runtime.submit_all([([5, place], {"max_new_tokens": 2}) for place in range(4)])
    assert [handle.result(60).stats.new_tokens > 0 for handle in handles] == [True] * 4
    assert runtime.close(timeout=60)


def test_a_list_may_be_longer_than_the_queue(branch_plan: Path, alone: Runtime) -> None:
    runtime = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=2, max_waiting=2))
    prompts = [[5, place] for place in range(1, 12)]
    cancel = threading.Event()
    for _ in range(2):  # the caller's event stays as it was
        found = runtime.generate(prompts, max_new_tokens=4, cancel=cancel, ignore_eos=True)
        expected = [alone.generate(prompt, max_new_tokens=4, ignore_eos=True).token_ids for prompt in prompts]
        assert [each.token_ids for each in found] == expected
    assert not cancel.is_set()
    cancel.set()
    assert {each.finish_reason.value for each in runtime.generate(prompts, cancel=cancel)} == {"cancelled"}
    assert runtime.close(timeout=60)


def test_a_runtime_may_be_closed_before_its_first_request(branch_plan: Path) -> None:
    with Runtime.load(branch_plan, threads=1) as runtime:
        session = runtime.session()
        handle = runtime.submit([5], max_new_tokens=4)
    assert "closed" in repr(runtime)
    assert "0 tokens" in repr(session)
    assert "done" in repr(handle)
    for one in (runtime, session, handle):
        with pytest.raises(TypeError, match="of its process"):
            pickle.dumps(one)
    assert session.generate([5], max_new_tokens=1).token_ids  # what is open continues
    for ask in (runtime.submit, runtime.generate, runtime.stream, runtime.beam_search):
        with pytest.raises(BusyError, match="closed"):
            ask([5])
    with pytest.raises(BusyError, match="closed"):
        runtime.session()
    with pytest.raises(BusyError, match="closed"):
        runtime.generate_branches([5], n=2)
    session.close()


def test_without_a_seed_texts_differ_and_the_result_has_it(alone: Runtime) -> None:
    found = [alone.generate([5], max_new_tokens=12, temperature=1.0, ignore_eos=True) for _ in range(3)]
    found += alone.generate_branches([5, 6], n=2, max_new_tokens=12, temperature=1.0, ignore_eos=True)
    assert len({tuple(each.token_ids) for each in found}) == 5
    assert found[3].seed == found[4].seed
    again = alone.generate([5], max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=found[0].seed)
    assert again.token_ids == found[0].token_ids
    with pytest.raises(RequestError, match="generated holds tokens that were drawn, and there is no seed"):
        alone.generate([5], max_new_tokens=12, temperature=1.0, generated=[3])
    with pytest.raises(RequestError, match=r"Unknown option 'max_tokens' \(did you mean 'max_new_tokens'\?\)"):
        alone.generate([5], max_tokens=3)  # type: ignore[call-overload]


@pytest.mark.parametrize("plan", ["branch_plan", "toy_plan"])
@pytest.mark.parametrize("error", [PlanError, SystemExit])
def test_a_round_that_fails_fails_those_in_it_alone(
    plan: str, alone: Runtime, error: type[BaseException], request: pytest.FixtureRequest
) -> None:
    runtime = Runtime.load(request.getfixturevalue(plan), threads=1, prefix_cache=KEEP)
    expected = alone.generate([5, 6], max_new_tokens=9, ignore_eos=True).token_ids
    assert runtime.submit([5, 6], max_new_tokens=9, ignore_eos=True).result(60).token_ids == expected
    original, calls = Program.run, 0

    def failing(self: Program) -> None:
        nonlocal calls
        calls += self.name == "decode"
        if calls == 4:
            calls += 1
            raise error("the engine fell over")
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run", failing)
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
