"""What devices record: rounds as one launch, on an emulated device, and what becomes of recordings."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import closing
from typing import Any

import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.plans.plan import Plan
from outrider.runtime.backends import onnxruntime_cuda
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.backends.one_thread import OneThread
from outrider.runtime.backends.recorder import Recorder
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace
from tests.conftest import TOY_DRAFTERS
from tests.integration.shifting_rule import Shifting
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, driven

pytest.importorskip("cuda.core")

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


def loaded(plan: Plan, device: EmulatedDevice, **options: bool) -> Runtime:
    backend = EmulatedBackend(device, **options)
    with driven(CUDA, lambda target: backend):
        return Runtime.load(plan.root)


@pytest.fixture(scope="module")
def recorded(cuda_plan: Plan, device: EmulatedDevice) -> Runtime:
    """With all its rounds recorded, engines among them, as TensorRT's are."""
    return loaded(cuda_plan, device, records=True, records_engines=True)


@pytest.fixture(scope="module")
def halves(cuda_plan: Plan, device: EmulatedDevice) -> Runtime:
    """With ops recorded between engines that record themselves, as ONNX Runtime's do."""
    return loaded(cuda_plan, device, records=True)


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_a_round_is_one_launch(recorded: Runtime, device: EmulatedDevice, toy: Runtime, drafter: str) -> None:
    """All but the first, which computes the prompt, and with a drafter the second, which is the first to draft.

    Without a draft it is two and a copy, as the host may write again before the round is over. A draft model's
    tree takes one for its own rows, and a head one where a round has no room for a draft.
    """
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, drafter=drafter, temperature=0.7, seed=2)
    expected = toy.generate(PROMPT, **options)
    rounds = enqueued = replays = kept = across = 0
    with closing(recorded.stream(PROMPT, **options)) as stream:
        found = []
        for span in stream:
            found += span.token_ids
            decoded = device.launched.get("outrider_keep_tokens", 0) - kept
            if rounds > 1 and not (drafter == "none" and len(found) == 30):  # launched a step before
                looks = len(span.token_ids) if drafter in ("ngram", "short", "mixed") else 0  # at logits
                copies = device.enqueued - enqueued - looks
                launches = device.replays - replays - (1 if drafter == "none" else decoded)  # decoding takes two
                moved = device.copied.get("across", 0) - across  # features that a head keeps
                assert copies == 1 if drafter == "none" else (copies > decoded if moved else copies == decoded)
                assert launches == 1 or (launches == 2 and drafter in ("bushy", "head", "mixed"))
            rounds, enqueued, replays = rounds + 1, device.enqueued, device.replays
            kept = device.launched.get("outrider_keep_tokens", 0)
            across = device.copied.get("across", 0)
    assert found == expected.token_ids
    assert rounds > 5


@pytest.mark.parametrize("drafter", TOY_DRAFTERS)
@pytest.mark.parametrize("engines", [True, False])
def test_a_round_halts_for_rules_before_it_accepts_and_for_limits_before_it_verifies(
    recorded: Runtime, halves: Runtime, toy: Runtime, drafter: str, engines: bool
) -> None:
    """What is recorded as one launch runs in two parts, and rounds without rules are recorded as before."""
    runtime, rounds = recorded if engines else halves, list[RoundTrace]()
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, temperature=0.7, seed=2)
    limits = Options(draft_tokens=3, draft_depth=2, on_round=rounds.append)
    for rule in (None, Shifting(), None):
        options["constraint"] = rule
        expected = toy.generate(PROMPT, **options | Options(drafter="none"))
        for own in (Options(), limits):
            found = runtime.generate(PROMPT, **options | Options(drafter=drafter) | own)
            assert found.token_ids == expected.token_ids
            assert found.stats.accepted > 0 or drafter not in ("chain", "bushy")
    assert all(len(each.nodes) <= 3 and all(node.depth <= 2 for node in each.nodes) for each in rounds)


def test_what_an_engine_may_record_ends_with_a_warning(
    cuda_plan: Plan, emulator: Emulator, toy: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime_cuda, "MOST_GRAPHS", 20)
    with caplog.at_level(logging.WARNING, "outrider"):
        runtime = loaded(cuda_plan, EmulatedDevice(emulator), records=True)
    assert [record for record in caplog.messages if "has recorded 20 sizes of step in all sessions" in record]
    options = Options(max_new_tokens=20, ignore_eos=True, drafter="head")
    assert runtime.generate(PROMPT, **options).token_ids == toy.generate(PROMPT, **options).token_ids


def test_what_a_session_has_recorded_is_for_the_next(cuda_plan: Plan, emulator: Emulator) -> None:
    """Three at a time record three times, independent of their number."""
    device = EmulatedDevice(emulator)
    runtime = loaded(cuda_plan, device, records=True)
    engines = runtime.loaded.engines.values()
    used = [engine._engine._graphs.next() for engine in engines]  # ids go up by one
    per_session = [number - before for before, number in zip([0] * len(used), used, strict=True)]
    for _ in range(3):
        sessions = [runtime.session() for _ in range(3)]
        for session in sessions:
            session.generate(PROMPT, max_new_tokens=2, drafter="none")
        for session in sessions:
            session.close()
    after = [engine._engine._graphs.next() for engine in engines]
    assert after == [number + 1 + 2 * own for number, own in zip(used, per_session, strict=True)]
    assert runtime.memory().idle == 3


def test_a_program_that_fails_is_waited_for(
    cuda_plan: Plan, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has enqueued reads memory of the host, which writes there next."""
    device = EmulatedDevice(emulator)
    session = loaded(cuda_plan, device).session()
    session.generate(PROMPT, max_new_tokens=2, drafter="none")

    def fail(*launched: Any) -> None:
        raise PlanError("no launch")

    monkeypatch.setattr(device, "launch", fail)
    with pytest.raises(PlanError, match="no launch"):
        session.generate(max_new_tokens=2, drafter="none")
    assert not device._queue


def test_a_recording_that_fails_is_ended_with_the_reason(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = EmulatedDevice(emulator), list[int]()
    end = device.end_recording

    def fail() -> None:
        end()
        raise PlanError("the GPU failed: cuStreamEndCapture: CAPTURE_INVALIDATED")

    def work() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ValueError("an error of an engine")

    monkeypatch.setattr(device, "end_recording", fail)
    recorder = Recorder(device)
    recorder.recording = True
    run = recorder.stretch([work], [[1]])
    with device.lock():
        with pytest.raises(ValueError, match="an error of an engine"):
            run()
        recorder.recording = False
        run()
    assert (len(seen), device.graphs) == (3, 0)
    recorder.clear()


def test_what_was_not_recorded_runs_plainly(device: EmulatedDevice) -> None:
    """And no finaliser runs while a graph is recorded: it may enqueue, as what a session leaves is kept."""
    recorder, sizes, before = Recorder(device), [0], (device.graphs, device.replays)
    ran, collects = list[int](), list[bool]()
    run = recorder.stretch([lambda: ran.append(sizes[0]), lambda: collects.append(gc.isenabled())], [sizes])
    with device.lock():
        recorder.recording = True
        for sizes[0] in (3, 2):
            run()
        recorder.recording = False
        assert ran == [3, 3, 2, 2]  # once to warm up, once to be recorded
        assert collects == [True, False] * 2
        for sizes[0] in (1, 2, 1, 3):
            run()
    assert ran[4:] == [1, 1]
    assert (device.graphs, device.replays) == (before[0] + 2, before[1] + 2)
    recorder.clear()
    assert device.graphs == before[0]


def test_half_a_session_is_given_back_where_memory_ends(
    cuda_plan: Plan, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = EmulatedDevice(emulator)
    allocate = device.allocate

    def three_times(size: int) -> int:
        if len(device._memory) == 3:
            raise PlanError("the GPU failed: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory")
        return allocate(size)

    monkeypatch.setattr(device, "allocate", three_times)
    for _ in range(3):
        with pytest.raises(PlanError, match=r"needs 0\.0 GB on the GPU and on the host.*OUT_OF_MEMORY.*capacity"):
            DeviceBuffers(cuda_plan.manifest.backends[CUDA], device)
        gc.collect()
        assert not device._memory


def test_calls_run_in_one_thread_that_ends_with_its_owner_and_raise_here() -> None:
    thread, seen = OneThread(), list[threading.Thread]()
    caller = threading.Thread(target=thread.run, args=(lambda: seen.append(threading.current_thread()),))
    caller.start()
    caller.join()
    thread.run(lambda: seen.append(threading.current_thread()))

    def fails() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        thread.run(fails)
    thread.run(lambda: seen.append(threading.current_thread()))
    (own,) = set(seen)
    assert own.is_alive()
    assert own is not threading.current_thread()
    del thread
    gc.collect()
    own.join(60)
    assert not own.is_alive()
