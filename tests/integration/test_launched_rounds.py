"""The host one step after the device: rounds are launched before the tokens of the round before are known.

Devices are emulated twice: work is done as late as it may be, and as early. Both the same: the host has neither written
what the device was still to read, nor read what it was still to write.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider import PrefixCacheConfig, Runtime, Session
from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.plan import Plan
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import resolve
from outrider.runtime.rounds.launched import Launch
from outrider.runtime.sequence import Sequence
from outrider.runtime.step_loop import StepLoop
from tests.integration.long_context import prompt
from tests.integration.shifting_rule import Shifting
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EagerDevice, EmulatedBackend, EmulatedDevice, driven

pytest.importorskip("cuda.core")

PROMPT = prompt(1, 20)
SAMPLED = Options(temperature=0.9, seed=5, drafter="none", ignore_eos=True)
WAYS = {"late": EmulatedDevice, "early": EagerDevice}


def emulated(plan: Path, emulator: Emulator, way: str, *, records: bool) -> Iterator[Runtime]:
    backend = EmulatedBackend(WAYS[way](emulator), records=records)
    with driven(CUDA, lambda target: backend):
        yield Runtime.load(plan)


@pytest.fixture(scope="module", params=["late", "early"])
def one(request: pytest.FixtureRequest, cuda_plan: Plan, emulator: Emulator) -> Iterator[Runtime]:
    """A plan of one sequence."""
    yield from emulated(cuda_plan.root, emulator, request.param, records=False)


@pytest.fixture(scope="module", params=["late", "early"])
def four(request: pytest.FixtureRequest, everything_cuda_plan: Path, emulator: Emulator) -> Iterator[Runtime]:
    """A plan of four sequences, in one row or in a row each."""
    yield from emulated(everything_cuda_plan, emulator, request.param, records=False)


def launches(engine: StepLoop) -> bool:
    """Whether a round was launched that is not collected yet."""
    return engine._launched.outstanding is not None


def test_the_next_round_runs_while_a_span_is_handed_out(one: Runtime, toy: Runtime) -> None:
    session, found, behind = one.session(), [], []
    with closing(session.stream(PROMPT, max_new_tokens=9, **SAMPLED)) as stream:
        for span in stream:
            found += span.token_ids
            behind.append(launches(session.loop))
    assert found == toy.generate(PROMPT, max_new_tokens=9, **SAMPLED).token_ids
    # The first round has computed the prompt, and after the last one there is none.
    assert behind == [False] + [True] * 7 + [False]


WATCHED = {
    "ngram": Options(drafter="ngram"),
    "head": Options(drafter="head"),
    "logprobs": Options(logprobs=2),
    "a rule": Options(constraint=Shifting()),
    "a watcher": Options(on_round=lambda round: None),
    "penalties": Options(repetition_penalty=1.3),
}


@pytest.mark.parametrize("options", WATCHED.values(), ids=WATCHED)
def test_rounds_on_which_more_depends_than_a_token_are_waited_for(one: Runtime, toy: Runtime, options: Options) -> None:
    session, found = one.session(), []
    options = SAMPLED | options | Options(max_new_tokens=9)
    with closing(session.stream(PROMPT, **options)) as stream:
        for span in stream:
            found += span.token_ids
            assert not launches(session.loop)
    assert found == toy.generate(PROMPT, **options).token_ids


def test_ends_that_only_tokens_tell(one: Runtime, toy: Runtime) -> None:
    """End tokens and stop strings, at every place of a text, and turns after them."""
    whole = toy.generate(PROMPT, max_new_tokens=12, **SAMPLED)
    for place in range(12):
        for stop in (
            Options(eos_token_ids=[whole.token_ids[place]], ignore_eos=False),
            Options(stop=[toy.session().text_behind(whole.token_ids[place : place + 1]) or "never"]),
        ):
            mine, theirs = one.session(), toy.session()
            for turn in (PROMPT, [7, 8], []):
                options = SAMPLED | Options(max_new_tokens=12) | stop
                found, expected = (session.generate(turn, **options) for session in (mine, theirs))
                assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
                assert found.finish_reason == expected.finish_reason
                assert found.stats.rounds == expected.stats.rounds
            assert mine.token_ids == theirs.token_ids


def test_a_stream_that_is_left_and_a_sequence_that_is_cut(one: Runtime, toy: Runtime) -> None:
    mine, theirs = one.session(), toy.session()
    for session in (mine, theirs):
        with closing(session.stream(PROMPT, max_new_tokens=20, **SAMPLED)) as stream:
            for _ in range(5):
                next(stream)
        session.truncate(len(PROMPT) + 3)
    assert not launches(mine.loop)
    assert mine.token_ids == theirs.token_ids
    for drafter in ("none", "head", "none", "chain"):
        found, expected = (
            session.generate([5], max_new_tokens=6, **SAMPLED | Options(drafter=drafter)) for session in (mine, theirs)
        )
        assert found.token_ids == expected.token_ids
    assert mine.token_ids == theirs.token_ids


def test_logits_behind_a_cut_are_nobodys_and_the_session_goes_on(one: Runtime, toy: Runtime) -> None:
    for length in (0, 10):
        session = one.session()
        with closing(session.stream(PROMPT, max_new_tokens=20, **SAMPLED)) as stream:
            for _ in range(4):
                next(stream)
        session.truncate(length)
        assert session.step_logits(0).shape == (300,)
        assert session.token_ids == PROMPT[:length]
        expected = toy.generate([*PROMPT[:length], 9], max_new_tokens=5, **SAMPLED).token_ids
        assert session.generate([9], max_new_tokens=5, **SAMPLED).token_ids == expected


def test_a_round_is_timed_behind_an_end_token(one: Runtime) -> None:
    end = one.generate(PROMPT, max_new_tokens=4, **SAMPLED).token_ids[-1]
    session = one.session()
    session.generate(PROMPT, max_new_tokens=9, **SAMPLED | Options(eos_token_ids=[end], ignore_eos=False))
    assert session.time_round([1, 2], "ngram") > 0


def test_what_asks_for_logits_waits_from_then_on(one: Runtime) -> None:
    session, behind = one.session(), []
    for _ in session.stream(PROMPT, max_new_tokens=8, **SAMPLED):
        behind.append(launches(session.loop))
        if len(behind) == 4:
            session.step_logits(0)
    assert behind == [False, True, True, True, False, False, False, False]


def test_a_cancelled_generation_ends(one: Runtime, toy: Runtime) -> None:
    cancel, found = Event(), []
    session = one.session()
    for span in session.stream(PROMPT, max_new_tokens=20, cancel=cancel, **SAMPLED):
        found += span.token_ids
        if len(found) == 4:
            cancel.set()
    assert found == toy.generate(PROMPT, max_new_tokens=4, **SAMPLED).token_ids
    assert session.token_ids == PROMPT + found


def test_logits_of_the_last_span_are_there(one: Runtime) -> None:
    """Of rounds that were overtaken, and of the one after which nothing was launched."""
    session, plain = one.session(), one.session()
    stream = plain.stream(PROMPT, max_new_tokens=6, logprobs=0, **SAMPLED)
    expected = [(span.token_ids, plain.step_logits(0).copy()) for span in stream]
    found = []
    for span in session.stream(PROMPT, max_new_tokens=6, **SAMPLED):
        found.append((span.token_ids, session.step_logits(0).copy()))
        np.testing.assert_array_equal(session.step_logits(0), found[-1][1])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
    assert session.token_ids == plain.token_ids


@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
def test_branches_that_end_at_different_times(four: Runtime, everything: Runtime, mode: str) -> None:
    asked = [
        SAMPLED | Options(prompt=[7 + place], max_new_tokens=3 + 4 * place, stream_id=place)  # type: ignore[typeddict-unknown-key]
        for place in range(4)
    ]
    ends = everything.generate_branches(PROMPT, asked, mode=mode)
    for place in (1, 2, 3):  # of these, a token that only the end shows
        asked[place] |= Options(eos_token_ids=[ends[place].token_ids[2 * place]], ignore_eos=False)
    expected = [each.token_ids for each in everything.generate_branches(PROMPT, asked, mode=mode)]
    assert [each.token_ids for each in four.generate_branches(PROMPT, asked, mode=mode)] == expected
    engine = four.engines.loops[0]
    assert not launches(engine)


@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
@pytest.mark.parametrize("seed", range(3))
def test_sequences_come_and_go(four: Runtime, everything: Runtime, mode: str, seed: int) -> None:
    """Some draft, some watch, most do neither: whatever runs beside them, all have the tokens that they have alone."""
    chance = random.Random(seed)
    wanted = []
    for place in range(10):
        options = SAMPLED | Options(max_new_tokens=chance.randrange(2, 20), stream_id=place)
        others = [
            Options(drafter="head"),
            Options(drafter="ngram"),
            Options(logprobs=1),
            Options(constraint=Shifting()),
        ]
        options |= chance.choice(others) if place in (3, 6) else Options()
        tokens = prompt(chance.randrange(4), chance.choice([1, 9, 40, 75]))
        wanted.append((tokens, options))
    expected = [everything.generate(tokens, **options).token_ids for tokens, options in wanted]
    wanted = [
        (tokens, options | Options(eos_token_ids=[found[-1 - place % 3 :][0]], ignore_eos=False))
        for place, ((tokens, options), found) in enumerate(zip(wanted, expected, strict=True))
    ]
    expected = [everything.generate(tokens, **options).token_ids for tokens, options in wanted]
    engine = four.engines.borrow()
    try:
        assert run(engine, four, wanted, mode, chance) == expected
    finally:
        four.engines.give_back(engine)


def run(
    engine: StepLoop, runtime: Runtime, wanted: list[tuple[list[int], Options]], mode: str, chance: random.Random
) -> list[list[int]]:
    """Serve the requests as a scheduler does, each admitted at some step."""
    drafters = {drafter.name for drafter in runtime.manifest.drafters}
    engine.begin([], drafters, mode)  # type: ignore[arg-type]
    waiting, running, found, ahead = list(enumerate(wanted)), [], {}, 0
    while waiting or running:
        engine.settle(running)
        while waiting and len(running) < 4 and (not running or chance.random() < 0.6):
            place, (tokens, options) = waiting[0]
            request = resolve(options, runtime.manifest, runtime.loaded.grammars)
            if not engine.fits(len(tokens), request):
                break
            running.append(engine.admit(place, tokens, request))
            waiting.pop(0)
        if not running:
            continue
        for committed in engine.step(running, chance.choice([None, 8])):
            if committed.sequence.stopped:
                continue
            span = engine.show(committed)
            assert span.error is None
            if span.result is not None:
                found[span.sequence] = span.result.token_ids
        ahead += launches(engine)
        for each in running:
            assert each.unseen in (0, 1)
    assert ahead > 3
    return [found[place] for place in sorted(found)]


@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
def test_a_prompt_that_is_cancelled_in_parts_leaves_nothing(four: Runtime, everything: Runtime, mode: str) -> None:
    cancel = Event()
    engine = four.engines.borrow()
    try:
        engine.begin([], {None}, mode)  # type: ignore[arg-type]
        asked = [(PROMPT[:9], SAMPLED | Options(max_new_tokens=12)), (prompt(2, 75), SAMPLED | Options(cancel=cancel))]
        requests = [resolve(options, four.manifest, four.loaded.grammars) for _, options in asked]
        running = [engine.admit(0, asked[0][0], requests[0])]
        for _ in range(4):
            for committed in engine.step(running, 8):
                engine.show(committed)
        running.append(engine.admit(1, asked[1][0], requests[1]))
        passes = []
        while len(running) == 2:
            for committed in engine.step(running, 8):
                span = engine.show(committed)
                if span.result is not None:
                    passes.append((span.sequence, span.result.stats.prefill_passes))
            stats = running[1].generation.stats
            if stats.prefill_passes == 2:
                cancel.set()
            engine.settle(running)
        assert passes == [(1, 2)]
        (left,) = running
        while not left.over:
            for committed in engine.step(running):
                engine.show(committed)
        assert stats.prefill_passes == 2
        assert not launches(engine)
        expected = everything.generate(asked[0][0], **SAMPLED | Options(max_new_tokens=12)).token_ids
        assert left.generated == expected
    finally:
        four.engines.give_back(engine)


def test_a_text_that_ends_while_a_step_runs(cuda_plan: Plan, emulator: Emulator, toy: Runtime) -> None:
    """As a scheduler's other thread finds a stop string: what the prefix cache keeps is what was computed."""
    backend = EmulatedBackend(EmulatedDevice(emulator))
    with driven(CUDA, lambda target: backend):
        runtime = Runtime.load(cuda_plan.root, prefix_cache=PrefixCacheConfig())
    engine = runtime.engines.borrow()
    request = resolve(SAMPLED | Options(max_new_tokens=30), runtime.manifest, runtime.loaded.grammars)
    for ending in range(4, 7):
        engine.begin([], {None})
        sequence = engine.admit(0, PROMPT, request)
        for round_number in range(ending):
            if round_number + 1 == ending:
                collect = engine._launched.collect

                def collect_and_end(launch: Launch, collect: Any = collect, ends: Sequence = sequence) -> None:
                    collect(launch)
                    ends.stopped = True

                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(engine._launched, "collect", collect_and_end)
                    assert not engine.step([sequence])
            else:
                for committed in engine.step([sequence]):
                    engine.show(committed)
        tokens = list(sequence.tokens)
        engine.release(sequence)
        assert runtime.prefix_cache is not None
        runtime.prefix_cache.check()
        found = runtime.generate(tokens, max_new_tokens=6, **SAMPLED)
        assert found.stats.reused_tokens == len(tokens) - 1
        assert found.token_ids == toy.generate(tokens, max_new_tokens=6, **SAMPLED).token_ids


def test_a_fault_takes_back_what_was_launched(one: Runtime, toy: Runtime) -> None:
    session = one.session()
    found, kept = list[int](), list[NDArray[np.float32]]()

    def read_on() -> None:
        for span in session.stream(PROMPT, max_new_tokens=20, **SAMPLED):
            found.extend(span.token_ids)
            if len(found) == 4:
                kept.append(swap_kv(session, np.full(1, np.nan, np.float32)))

    with pytest.raises(PlanError, match="contain NaN"):
        read_on()
    assert not launches(session.loop)
    expected = toy.generate(PROMPT, max_new_tokens=len(found), **SAMPLED).token_ids
    assert found == expected
    assert session.token_ids == PROMPT + found
    swap_kv(session, kept[0])
    whole = toy.generate(PROMPT, max_new_tokens=len(found) + 5, **SAMPLED).token_ids
    assert session.generate(max_new_tokens=5, **SAMPLED).token_ids == whole[len(found) :]


def swap_kv(session: Session, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Fill the target's KV cache; return what was there."""
    buffers = session.buffers
    assert isinstance(buffers, DeviceBuffers)
    kv = buffers.memory[names.buffer_name(names.TARGET, names.KV)]
    found = np.empty(int(np.prod(kv.shape)), np.float32)
    filled = np.broadcast_to(numbers, found.shape) if len(numbers) == 1 else numbers
    filled = np.ascontiguousarray(filled)
    with buffers.device.lock():
        buffers.device.to_host(found.ctypes.data, kv.address, found.nbytes)
        buffers.device.to_device(kv.address, filled.ctypes.data, filled.nbytes)
        there = buffers.device.mark()
    buffers.device.wait_for(there)
    return found


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("records", [False, True])
def test_an_engine_that_is_left_with_a_round_is_given_back(cuda_plan: Plan, emulator: Emulator, records: bool) -> None:
    (runtime,) = emulated(cuda_plan.root, emulator, "late", records=records)
    session = runtime.session()
    stream = session.stream(PROMPT, max_new_tokens=9, **SAMPLED)
    spans = [next(stream) for _ in range(4)]
    assert launches(session.loop)
    buffers = session.buffers
    assert isinstance(buffers, DeviceBuffers)
    device, addresses = buffers.device, list(buffers._addresses)
    assert isinstance(device, EmulatedDevice)
    assert device._memory.keys() >= set(addresses)
    runtime.engines.loops.clear()
    del stream, session, runtime, spans, buffers
    gc.collect()
    assert not device._queue
    assert device._memory.keys().isdisjoint(addresses)
