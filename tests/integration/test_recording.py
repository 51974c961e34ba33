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
from outrider.plans.pass_prices import Price
from outrider.plans.plan import Plan
from outrider.runtime.backends import onnxruntime_cuda
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.backends.one_thread import OneThread
from outrider.runtime.backends.recorder import Recorder
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation, AdaptiveSpeculations
from outrider.runtime.drafters.verify_length import PriceCurve
from outrider.runtime.options.options import Options
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.trace import Round
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
@pytest.mark.parametrize(
    "sampling", [pytest.param(Options(temperature=0.0), marks=pytest.mark.long), Options(temperature=0.7, seed=2)],
    ids=str,
)  # fmt: skip
def test_a_round_is_one_launch(
    recorded: Runtime, device: EmulatedDevice, toy: Runtime, drafter: str, sampling: Options
) -> None:
    """All but the first, which computes the prompt, and with a drafter the second, which is the first to draft.

    Without a draft it is two and a copy, as the host may write again before the round is over. A chain that is as long
    as its drafter is sure takes one for each token, a draft model's tree one for its own rows, and a head one where a
    round has no room for a draft.
    """
    options = sampling | Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, drafter=drafter)
    expected = toy.generate(PROMPT, **options)
    rounds = enqueued = replays = kept = across = 0
    with closing(recorded.stream(PROMPT, **options)) as stream:
        found = []
        for span in stream:
            found += span.token_ids
            decoded = device.launched.get("outrider_keep_tokens", 0) - kept
            if rounds > 1 and not (drafter == "none" and len(found) == 30):  # launched a step before
                looks = (
                    len(span.token_ids) if drafter in ("ngram", "short", "mixed") else 0
                )  # at logits, to guess better
                copies = device.enqueued - enqueued - looks
                launches = device.replays - replays - (1 if drafter == "none" else decoded)  # decoding takes two
                moved = device.copied.get("across", 0) - across  # features that a head keeps
                assert copies == 1 if drafter == "none" else (copies > decoded if moved else copies == decoded)
                assert (
                    launches == 1
                    or drafter == "sure"
                    or (drafter, launches) in (("bushy", 2), ("head", 2), ("mixed", 2))
                )
            rounds, enqueued, replays = rounds + 1, device.enqueued, device.replays
            kept = device.launched.get("outrider_keep_tokens", 0)
            across = device.copied.get("across", 0)
    assert found == expected.token_ids
    assert rounds > 5


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_engines_that_record_themselves_are_one_launch_each(
    halves: Runtime, device: EmulatedDevice, toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = list[str]()
    original = onnxruntime_cuda._run_options

    def counting(graph: str) -> Any:
        plain.append(graph)
        return original(graph)

    monkeypatch.setattr(onnxruntime_cuda, "_run_options", counting)
    options = Options(max_new_tokens=60, ignore_eos=True, auto_disable=False, drafter=drafter, temperature=0.7, seed=2)
    expected = toy.generate(PROMPT, **options)
    rounds = 0
    with closing(halves.stream(PROMPT, **options)) as stream:
        found = []
        for span in stream:
            found += span.token_ids
            if rounds > 1:
                assert not plain  # whatever ran has a graph
            rounds += 1
            plain.clear()
    assert found == expected.token_ids


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize("engines", [True, False])
def test_a_round_with_rules_halts_before_it_accepts(
    recorded: Runtime, halves: Runtime, toy: Runtime, drafter: str, engines: bool
) -> None:
    """What is recorded as one launch runs in two parts, and rounds without rules are recorded as before."""
    runtime = recorded if engines else halves
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, temperature=0.7, seed=2)
    expected = toy.generate(PROMPT, constraint=Shifting(), **options | Options(drafter="none"))
    found = runtime.generate(PROMPT, constraint=Shifting(), **options | Options(drafter=drafter))
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted > 0 or drafter not in ("chain", "bushy", "sure")
    free = runtime.generate(PROMPT, **options | Options(drafter=drafter))
    assert free.token_ids == toy.generate(PROMPT, **options | Options(drafter="none")).token_ids


@pytest.mark.parametrize("drafter", ["chain", "sure", "bushy", "head", "ngram"])
@pytest.mark.parametrize("engines", [True, False])
def test_a_draft_is_cut_before_it_is_verified(
    recorded: Runtime, halves: Runtime, toy: Runtime, drafter: str, engines: bool
) -> None:
    runtime = recorded if engines else halves
    rounds: list[Round] = []
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, temperature=0.7, seed=2)
    for rule in (None, Shifting()):
        options["constraint"] = rule
        expected = toy.generate(PROMPT, **options | Options(drafter="none"))
        own = Options(drafter=drafter, draft_tokens=3, draft_depth=2, on_round=rounds.append)
        found = runtime.generate(PROMPT, **options | own)
        assert found.token_ids == expected.token_ids
        assert found.stats.accepted > 0 or drafter not in ("chain", "bushy", "sure")
    assert all(len(each.nodes) <= 3 and all(node.depth <= 2 for node in each.nodes) for each in rounds)


@pytest.mark.parametrize("drafter", ["bushy", "head", "sure"])
def test_the_price_of_a_pass_cuts_no_tree_that_is_drafted_and_verified_in_one_launch(
    recorded: Runtime, toy: Runtime, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that is drafted token by token is cut."""
    monkeypatch.setattr(AdaptiveSpeculation, "gain", lambda self: 2.0)
    monkeypatch.setattr("outrider.runtime.drafters.verify_length._FEWEST", 1)
    steep = PriceCurve([Price(rows=1, ms=1.0), Price(rows=9, ms=8001.0)])
    options = Options(max_new_tokens=60, ignore_eos=True, drafter=drafter)
    with recorded.session() as session:
        monkeypatch.setattr(session.loop.parts, "adaptive", AdaptiveSpeculations(session.manifest, steep))
        found = session.generate(PROMPT, **options)
    assert found.token_ids == toy.generate(PROMPT, **options | Options(drafter="none")).token_ids
    assert (found.stats.left_out > 0) == (drafter == "sure")


def test_turns_with_cuts_in_several_threads(halves: Runtime, toy: Runtime) -> None:
    def talk(runtime: Runtime, seed: int) -> list[list[int]]:
        session, turns = runtime.session(), []
        for turn, drafter in enumerate(("head", "ngram", "none", "bushy")):
            if turn == 2:
                session.truncate(len(session.token_ids) - 3)
            options = Options(max_new_tokens=9, ignore_eos=True, drafter=drafter, temperature=0.8, seed=seed)
            turns.append(session.generate([5 + seed, 6], **options).token_ids)
        return turns

    found: dict[int, list[list[int]]] = {}
    threads = [threading.Thread(target=lambda s=seed: found.update({s: talk(halves, s)})) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: talk(toy, seed) for seed in range(3)}


@pytest.mark.parametrize("engines", [False, True])
def test_graphs_and_memory_of_a_session_are_given_back(cuda_plan: Plan, emulator: Emulator, engines: bool) -> None:
    device = EmulatedDevice(emulator)
    runtime = loaded(cuda_plan, device, records=True, records_engines=engines)
    before = device.graphs, len(device._memory)
    engine = StepLoop(runtime.loaded)
    assert device.graphs > before[0]
    assert runtime.generate(PROMPT, max_new_tokens=3).token_ids
    del engine
    gc.collect()
    assert (device.graphs, len(device._memory)) == before


def test_what_an_engine_may_record_ends_with_a_word(
    cuda_plan: Plan, emulator: Emulator, toy: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime_cuda, "MOST_GRAPHS", 20)
    with caplog.at_level(logging.WARNING, "outrider"):
        runtime = loaded(cuda_plan, EmulatedDevice(emulator), records=True)
    assert [record for record in caplog.messages if "has recorded 20 sizes of step in all sessions" in record]
    options = Options(max_new_tokens=20, ignore_eos=True, drafter="head")
    assert runtime.generate(PROMPT, **options).token_ids == toy.generate(PROMPT, **options).token_ids


class Failing(EmulatedDevice):
    """Whose recordings cannot be ended as if nothing had happened."""

    def end_recording(self) -> Any:
        super().end_recording()
        raise PlanError("the GPU failed: cuStreamEndCapture: CAPTURE_INVALIDATED")


def test_what_a_session_has_recorded_is_for_the_next(cuda_plan: Plan, emulator: Emulator) -> None:
    """Three at a time record three times, however many come."""
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


def test_programs_that_run_an_engine_alike_record_it_once(cuda_plan: Plan, emulator: Emulator) -> None:
    """A chain of eight tokens is verified alike, whoever has drafted it."""
    runtime = loaded(cuda_plan, EmulatedDevice(emulator), records=True)
    target = runtime.loaded.engines["target"]._engine
    (bound,) = {id(each): each for each in target._bound.values()}.values()
    assert len(bound._recorded) == target._graphs.next() < 60


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


def test_no_finaliser_runs_while_a_graph_is_recorded(device: EmulatedDevice) -> None:
    """It may enqueue: what a session leaves is kept in the prefix cache."""
    collects = list[bool]()
    recorder = Recorder(device)
    recorder.recording = True
    with device.lock():
        recorder.stretch([lambda: collects.append(gc.isenabled())], [[1]])()
    assert collects == [True, False]
    assert gc.isenabled()
    recorder.clear()


def test_a_recording_that_fails_is_ended_and_says_why(emulator: Emulator) -> None:
    device = Failing(emulator)
    recorder, seen = Recorder(device), list[int]()
    recorder.recording = True

    def work() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ValueError("what an engine says")

    run = recorder.stretch([work], [[1]])
    with device.lock():
        with pytest.raises(ValueError, match="what an engine says"):
            run()
        recorder.recording = False
        run()
    assert len(seen) == 3
    assert device.graphs == 0
    recorder.clear()


def test_what_was_not_recorded_runs_plainly(device: EmulatedDevice) -> None:
    recorder, sizes, ran, before = Recorder(device), [0], list[int](), (device.graphs, device.replays)
    run = recorder.stretch([lambda: ran.append(sizes[0])], [sizes])
    with device.lock():
        recorder.recording = True
        for sizes[0] in (3, 2):
            run()
        recorder.recording = False
        assert ran == [3, 3, 2, 2]  # once to warm up, once to be recorded
        for sizes[0] in (1, 2, 1, 3):
            run()
    assert ran[4:] == [1, 1]
    assert (device.graphs, device.replays) == (before[0] + 2, before[1] + 2)
    recorder.clear()
    assert device.graphs == before[0]


class Full(EmulatedDevice):
    """Which has no memory after `left` pieces of it."""

    left = 3

    def allocate(self, size: int) -> int:
        if self.left == 0:
            raise PlanError("the GPU failed: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory")
        self.left -= 1
        return super().allocate(size)


def test_half_a_session_is_given_back_where_memory_ends(cuda_plan: Plan, emulator: Emulator) -> None:
    device = Full(emulator)
    plan = cuda_plan.manifest.backends[CUDA]
    for _ in range(3):
        device.left = 3
        with pytest.raises(PlanError, match=r"needs 0\.0 GB on the GPU and on the host.*OUT_OF_MEMORY.*capacity"):
            DeviceBuffers(plan, device)
        gc.collect()
        assert not device._memory


# Calls of one thread.


def test_calls_run_in_one_thread_and_raise_here() -> None:
    thread, seen = OneThread(), list[int]()
    callers = [
        threading.Thread(target=lambda: thread.run(lambda: seen.append(threading.get_ident()))) for _ in range(3)
    ]
    for caller in callers:  # one at a time: in a session they hold the device's lock
        caller.start()
        caller.join()
    thread.run(lambda: seen.append(threading.get_ident()))
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()

    def fails() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        thread.run(fails)
    thread.run(lambda: seen.append(0))
    assert seen[-1] == 0


def test_the_thread_ends_with_its_owner() -> None:
    thread = OneThread()
    serving = list[threading.Thread]()
    thread.run(lambda: serving.append(threading.current_thread()))
    assert serving[0].is_alive()
    del thread
    gc.collect()
    serving[0].join(60)
    assert not serving[0].is_alive()
