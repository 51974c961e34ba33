"""The host one step after the device: rounds are launched before the tokens of the round before are known.

Devices are emulated twice: work is done as late as it may be, and as early. If tokens are the same, the host has not
written what the device was still to read, nor read what it was still to write.
"""

from __future__ import annotations

import gc
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
from outrider.runtime.step_loop import StepLoop
from tests.integration.long_context import prompt
from tests.integration.shifting_rule import Shifting
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.integration.test_random_use import expect_the_tokens_of_the_target_alone
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
    session, found, ahead = one.session(), [], []
    with closing(session.stream(PROMPT, max_new_tokens=9, **SAMPLED)) as stream:
        for span in stream:
            found += span.token_ids
            ahead.append(launches(session.loop))
    assert found == toy.generate(PROMPT, max_new_tokens=9, **SAMPLED).token_ids
    # The first round has computed the prompt, and after the last one there is none.
    assert ahead == [False] + [True] * 7 + [False]


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


def test_cancellation_timing_and_logits_stop_launching(one: Runtime, toy: Runtime) -> None:
    cancel, found, ahead = Event(), list[int](), list[bool]()
    session = one.session()
    for span in session.stream(PROMPT, max_new_tokens=20, cancel=cancel, **SAMPLED):
        found += span.token_ids
        if len(found) == 4:
            cancel.set()
    assert found == toy.generate(PROMPT, max_new_tokens=4, **SAMPLED).token_ids
    assert session.token_ids == PROMPT + found
    session.reset()
    session.generate(PROMPT, max_new_tokens=9, **SAMPLED | Options(eos_token_ids=[found[-1]], ignore_eos=False))
    assert session.time_round([1, 2], "ngram") > 0
    session.reset()
    for _ in session.stream(PROMPT, max_new_tokens=8, **SAMPLED):
        ahead.append(launches(session.loop))
        if len(ahead) == 4:
            session.step_logits(0)
    assert ahead == [False, True, True, True, False, False, False, False]


def test_logits_of_the_last_span_are_there(one: Runtime) -> None:
    """Of rounds that were overtaken, and of the one after which nothing was launched."""
    found, expected = (
        [(span.token_ids, session.step_logits(0).copy()) for span in session.stream(PROMPT, **SAMPLED, **options)]
        for session, options in (
            (one.session(), Options(max_new_tokens=6)), (one.session(), Options(max_new_tokens=6, logprobs=0)),
        )
    )  # fmt: skip
    for (tokens, mine), (others, theirs) in zip(found, expected, strict=True):
        assert tokens == others
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", ["in-one-sequence", "batching"])
@pytest.mark.usefixtures("run_ahead")
def test_tokens_of_random_use(
    four: Runtime, everything: Runtime, everything_cuda_plan: Path, mode: str, rounds: int
) -> None:
    """`four` has the device that the plan is loaded for again."""
    own: dict[str, Any] = {"seed": 3, "prefill_tokens": 8, "rejecting": ()}  # which draw by the bits of logits
    own["cache"] = PrefixCacheConfig(max_cached_tokens=512)
    expect_the_tokens_of_the_target_alone(everything, everything_cuda_plan, mode, rounds, **own)


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
    assert (device.graphs > 0) == records
    runtime.engines.loops.clear()
    del stream, session, runtime, spans, buffers
    gc.collect()
    assert not device._queue
    assert device._memory.keys().isdisjoint(addresses)
    assert device.graphs == 0
