"""Sessions on a device, emulated: the host's side of it, with real engines and the real kernels."""

from __future__ import annotations

import gc
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from compiler.agreement import find_parting
from compiler.build import build
from compiler.recipe import load_recipe
from plans import names
from plans.errors import PlanError
from plans.plan import Plan
from runtime import Runtime
from runtime.backends import BACKENDS, Driver, choose_target, onnxruntime_cuda
from runtime.backends.cuda_driver import architecture, fitting_kernels
from runtime.backends.device import LARGE, lay_out
from runtime.backends.recorder import Recorder
from runtime.request import Options
from tests.conftest import TOY_DRAFTERS
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice

pytest.importorskip("cuda.core")

PROMPT = [(37 * i) % 299 + 1 for i in range(20)]


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
def test_tokens_on_a_gpu_are_those_of_the_cpu(toy_recipe: Path, tmp_path: Path, toy: Runtime, drafter: str) -> None:
    """Up to near ties: the GPU sums in another order."""
    try:
        own = architecture()
    except PlanError as error:
        pytest.skip(str(error))
    target = f"targets=[{{kind: {CUDA}, compute_capabilities: [{own}]}}]"
    gpu = Runtime.load(build(load_recipe(toy_recipe, [target]), toy_recipe, tmp_path / "plan").plan.root)
    assert (gpu.target, gpu.passed_over) == (CUDA, {})
    for sampling in (Options(temperature=0.0), Options(temperature=0.8, top_p=0.9, seed=3)):
        options = sampling | Options(max_new_tokens=60, ignore_eos=True, auto_disable=False)
        session = toy.session()
        expected = session.generate(PROMPT, drafter="none", **options).token_ids
        found = gpu.generate(PROMPT, drafter=drafter, **options).token_ids
        parted = find_parting(session, PROMPT, options, expected, found)
        assert parted is None or parted[1] < 1e-3


@pytest.fixture
def runtime(cuda_plan: Plan, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return loaded(cuda_plan, EmulatedBackend(device), monkeypatch)


def loaded(plan: Plan, backend: EmulatedBackend, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setitem(BACKENDS, CUDA, Driver(lambda target: None, lambda target, settings: backend))
    return Runtime.load(plan.root)


@pytest.fixture(scope="module")
def recorded(cuda_plan: Plan, device: EmulatedDevice) -> Runtime:
    """With all its rounds recorded, engines among them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return loaded(cuda_plan, EmulatedBackend(device, records=True, records_engines=True), monkeypatch)


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize("sampling", [Options(temperature=0.0), Options(temperature=0.7, seed=2)], ids=str)
def test_a_round_is_one_launch(
    recorded: Runtime, device: EmulatedDevice, toy: Runtime, drafter: str, sampling: Options
) -> None:
    """All but the first, which computes the prompt, and with a drafter the second, which is the first to draft.

    A chain that is as long as its drafter is sure takes one for each token, a draft model's tree one for its own rows,
    and a head one where a round has no room for a draft.
    """
    options = sampling | Options(max_new_tokens=60, ignore_eos=True, auto_disable=False, drafter=drafter)
    expected = toy.generate(PROMPT, **options)
    rounds = enqueued = replays = 0
    with closing(recorded.stream(PROMPT, **options)) as stream:
        found = []
        for span in stream:
            found += span.token_ids
            if rounds > 1:
                looks = len(span.token_ids) if drafter == "short" else 0  # at logits, to guess better
                assert device.enqueued - enqueued == looks
                launches = device.replays - replays
                assert launches == 1 or drafter == "sure" or (drafter, launches) in (("bushy", 2), ("head", 2))
            rounds, enqueued, replays = rounds + 1, device.enqueued, device.replays
    assert found == expected.token_ids
    assert rounds > 5


def test_a_recording_that_fails_is_ended(device: EmulatedDevice) -> None:
    recorder, seen, before = Recorder(device), list[int](), device.graphs
    recorder.recording = True

    def work() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise ValueError("what an engine says")

    run = recorder.stretch([work], [[1]])
    with pytest.raises(ValueError, match="what an engine says"), device.lock():
        run()
    recorder.recording = False
    run()
    assert len(seen) == 3
    assert device.graphs == before
    recorder.clear()
    assert device.graphs == before


def test_what_was_not_recorded_runs_plainly(device: EmulatedDevice) -> None:
    recorder, sizes, ran, before = Recorder(device), [0], list[int](), (device.graphs, device.replays)
    run = recorder.stretch([lambda: ran.append(sizes[0])], [sizes])
    recorder.recording = True
    for sizes[0] in (3, 2):
        with device.lock():
            run()
    recorder.recording = False
    assert ran == [3, 3, 2, 2]  # once to warm up, once to be recorded
    for sizes[0] in (1, 2, 1, 3):
        run()
    assert ran[4:] == [1, 1]
    assert (device.graphs, device.replays) == (before[0] + 2, before[1] + 2)
    recorder.clear()
    assert device.graphs == before[0]


def test_it_is_preferred_where_it_can_run(runtime: Runtime) -> None:
    assert (runtime.target, runtime.passed_over) == (CUDA, {})


@pytest.mark.parametrize("drafter", ["none", *TOY_DRAFTERS])
@pytest.mark.parametrize(
    "sampling", [Options(temperature=0.0), Options(temperature=0.9, top_k=40, top_p=0.95, seed=5)], ids=str
)
def test_tokens_are_those_of_the_cpu(runtime: Runtime, toy: Runtime, drafter: str, sampling: Options) -> None:
    options = sampling | Options(max_new_tokens=14, ignore_eos=True, auto_disable=False)
    expected = toy.generate(PROMPT, drafter="none", **options)
    found = runtime.generate(PROMPT, drafter=drafter, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.drafted > 0 or drafter in ("none", "ngram", "short")  # counts may have nothing to say


def test_turns_cuts_and_logprobs(runtime: Runtime, toy: Runtime) -> None:
    options = Options(max_new_tokens=8, ignore_eos=True, drafter="bushy", logprobs=3)
    ours, theirs = runtime.session(), toy.session()
    for prompt in (PROMPT, [5, 6], []):
        mine, other = ours.generate(prompt, **options), theirs.generate(prompt, **options)
        assert mine.token_ids == other.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in mine.logprobs], [entry.logprob for entry in other.logprobs], atol=1e-4
        )


def test_a_session_goes_on_in_another_thread(runtime: Runtime, toy: Runtime) -> None:
    options = Options(max_new_tokens=6, ignore_eos=True, drafter="head", logprobs=1)
    session, other = runtime.session(), toy.session()
    expected = [other.generate(prompt, **options).token_ids for prompt in (PROMPT, [5])]
    found = [session.generate(PROMPT, **options).token_ids]
    thread = threading.Thread(target=lambda: found.append(session.generate([5], **options).token_ids))
    thread.start()
    thread.join()
    assert found == expected


def test_beam_search(runtime: Runtime, toy: Runtime) -> None:
    ours, theirs = (r.beam_search(PROMPT, beams=3, max_new_tokens=6) for r in (runtime, toy))
    assert [beam.token_ids for beam in ours] == [beam.token_ids for beam in theirs]


def test_a_step_launches_one_kernel_an_op_and_copies_the_small_block_alone(
    runtime: Runtime, device: EmulatedDevice
) -> None:
    stream = runtime.session().stream(PROMPT, max_new_tokens=12, drafter="head", ignore_eos=True, auto_disable=False)
    for _ in range(3):
        next(stream)
    device.launched.clear()
    device.copied.update(up=0, down=0)
    next(stream)
    assert device.launched == {
        "outrider_coupled_draws": 1, "outrider_bim_mask": 2, "outrider_tree_accept": 1, "outrider_kv_gather": 1,
    }  # fmt: skip
    layout = lay_out(runtime._target_plan)
    sent, fetched = (part.stop - part.start for part in (layout.sent, layout.fetched))
    assert device.copied == {"up": sent, "down": fetched}
    assert fetched < sent < layout.size
    stream.close()


def test_large_buffers_stay_on_the_device(runtime: Runtime) -> None:
    layout = lay_out(runtime._target_plan)
    assert {name.rpartition(".")[2] for name in layout.offsets}.isdisjoint(LARGE)
    assert names.of(names.TARGET, names.LOGIT_ROWS) in layout.offsets
    assert all(offset % 256 == 0 for offset in layout.offsets.values())


def test_memory_is_given_back(runtime: Runtime, device: EmulatedDevice) -> None:
    gc.collect()
    before = len(device._memory)
    session = runtime.session()
    logits = session._buffers.rows(names.TARGET, names.LOGITS_OUT, 0, 1)
    assert len(device._memory) > before
    del session
    gc.collect()
    assert len(device._memory) == before + 1  # the array that is still in use
    del logits
    gc.collect()
    assert len(device._memory) == before


def test_logits_that_are_not_numbers_are_an_error_and_the_session_goes_on(runtime: Runtime) -> None:
    session = runtime.session()
    session.generate(PROMPT, max_new_tokens=3, drafter="none", ignore_eos=True)
    kv = session._buffers.memory[names.of(names.TARGET, names.KV)]
    nan = np.full(int(np.prod(kv.shape)), np.nan, np.float32)
    with session.buffers.device.lock():
        session.buffers.device.to_device(kv.address, nan.ctypes.data, nan.nbytes)
    with pytest.raises(PlanError, match="contain NaN"):
        session.generate(max_new_tokens=3, drafter="none")
    nan[:] = 0.0
    with session.buffers.device.lock():
        session.buffers.device.to_device(kv.address, nan.ctypes.data, nan.nbytes)
    session.reset()
    assert len(session.generate(PROMPT, max_new_tokens=3, drafter="none", ignore_eos=True).token_ids) == 3


def test_without_a_gpu_the_reason_is_told(cuda_plan: Plan) -> None:
    targets = cuda_plan.manifest.targets
    reason = onnxruntime_cuda.reason_against(targets[CUDA])
    assert reason is not None
    chosen = choose_target(targets, None)
    assert (chosen.target, chosen.passed_over) == ("onnxruntime-cpu", {CUDA: reason})
    with pytest.raises(PlanError, match="cannot run here"):
        choose_target(targets, CUDA)


@pytest.mark.parametrize(
    ("own", "available", "fitting"),
    [
        ("sm_90", ["sm_80", "sm_90"], "sm_90"),
        ("sm_89", ["sm_80", "sm_86", "sm_90"], "sm_86"),
        ("sm_120", ["sm_80", "sm_120"], "sm_120"),
        ("sm_121", ["sm_120"], "sm_120"),
        ("sm_80", ["sm_86"], None),
        ("sm_75", ["sm_80"], None),
        ("sm_100", ["sm_90"], None),
    ],
)
def test_kernels_that_run_on_a_device(own: str, available: list[str], fitting: str | None) -> None:
    assert fitting_kernels(own, available) == fitting
