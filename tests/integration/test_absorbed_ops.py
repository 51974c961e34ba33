"""The target `tensorrt`, up to TensorRT itself: plans whose engines hold our ops give the tokens of the CPU's.

The graphs are those that TensorRT's parser would get, run with the plugins' own kernels as fibers; programs, buffers
and the device's side of a session are the real ones.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import compiler.build
from compiler.recipe import load_recipe
from plans import names
from plans.errors import PlanError
from plans.manifest import StageKind
from plans.plan import Plan
from runtime import Runtime
from runtime.backends import BACKENDS, Driver
from runtime.request import Options
from tests.conftest import TOY_DRAFTERS
from tests.plugins.emulator import Emulator
from tests.plugins.tensorrt_stand_in import StandIn
from tests.runtime.emulated_device import EmulatedDevice
from tests.runtime.emulated_tensorrt import EmulatedTensorRt, GraphsInPlaceOfEngines

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

TENSORRT = "tensorrt"
PROMPT = [(37 * i) % 299 + 1 for i in range(20)]


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The toy's plan for the target, graphs in place of engines."""
    out = tmp_path_factory.mktemp("tensorrt") / "plan"
    recipe = load_recipe(toy_recipe, [f"targets=[{TENSORRT}]"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.build, "open_folder", lambda target, folder, *_: GraphsInPlaceOfEngines(folder))
        patch.setattr(compiler.build, "facts_of_machine", lambda target: {"gpu": "none"})
        patch.setattr(compiler.build, "kernel_architectures", lambda target: ("sm_80",))
        return compiler.build.build(recipe, toy_recipe, out).plan


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> EmulatedTensorRt:
    folder = tmp_path_factory.mktemp("emulators")
    return EmulatedTensorRt(EmulatedDevice(Emulator(folder)), StandIn.built_in(folder))


@pytest.fixture
def runtime(plan: Plan, backend: EmulatedTensorRt, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setitem(BACKENDS, TENSORRT, Driver(lambda target: None, lambda target, threads: backend))
    return Runtime.load(plan.root)


def test_programs_keep_engines_and_what_works_in_place(plan: Plan) -> None:
    programs = plan.manifest.targets[TENSORRT].programs
    ran = {name: [(stage.kind, stage.run) for stage in program.stages] for name, program in programs.items()}
    engine, op = StageKind.ENGINE, StageKind.OP
    assert ran[names.PREFILL] == ran[names.DECODE] == ran[names.BEAM] == [(engine, "target")]
    assert ran[names.speculate("head")] == [(engine, "head"), (engine, "target"), (op, "KvGather")]
    assert ran[names.speculate("ngram")] == [(StageKind.DRAFT, "ngram"), (engine, "target"), (op, "KvGather")]
    assert ran[names.extend("head")] == [(engine, "head")]
    assert {stage.run for p in programs.values() for stage in p.stages if stage.kind is op} == {"KvGather"}


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


def test_turns_and_logprobs(runtime: Runtime, toy: Runtime) -> None:
    options = Options(max_new_tokens=8, ignore_eos=True, drafter="bushy", logprobs=3)
    ours, theirs = runtime.session(), toy.session()
    for prompt in (PROMPT, [5, 6], []):
        mine, other = ours.generate(prompt, **options), theirs.generate(prompt, **options)
        assert mine.token_ids == other.token_ids
        np.testing.assert_allclose(
            [entry.logprob for entry in mine.logprobs], [entry.logprob for entry in other.logprobs], atol=1e-4
        )


def test_beams_run_under_the_hosts_bias_and_a_session_goes_on_without(runtime: Runtime, toy: Runtime) -> None:
    ours, theirs = (r.beam_search(PROMPT, beams=3, max_new_tokens=6) for r in (runtime, toy))
    assert [beam.token_ids for beam in ours] == [beam.token_ids for beam in theirs]
    options = Options(max_new_tokens=6, ignore_eos=True, drafter="head")
    assert runtime.generate(PROMPT, **options).token_ids == toy.generate(PROMPT, **options).token_ids


def test_a_step_is_an_engine_for_each_model_and_the_rows_that_move(runtime: Runtime, backend: EmulatedTensorRt) -> None:
    device = backend.device
    stream = runtime.session().stream(PROMPT, max_new_tokens=40, drafter="head", ignore_eos=True, auto_disable=False)
    for _ in range(6):
        next(stream)
    device.launched.clear()
    backend.ran.clear()
    replays = device.replays
    next(stream)
    assert device.launched == {"outrider_kv_gather": 1}
    assert backend.ran == {"head": 1, "target": 1}
    assert device.replays == replays + 1
    stream.close()


def test_logits_that_are_not_numbers_are_an_error_and_the_session_goes_on(runtime: Runtime) -> None:
    session = runtime.session()
    session.generate(PROMPT, max_new_tokens=3, drafter="none", ignore_eos=True)
    kv = session._buffers.memory[names.of(names.TARGET, names.KV)]
    nan = np.full(int(np.prod(kv.shape)), np.nan, np.float32)
    session._buffers._device.to_device(kv.address, nan.ctypes.data, nan.nbytes)
    with pytest.raises(PlanError, match="contain NaN"):
        session.generate(max_new_tokens=3, drafter="none")
    nan[:] = 0.0
    session._buffers._device.to_device(kv.address, nan.ctypes.data, nan.nbytes)
    session.reset()
    assert len(session.generate(PROMPT, max_new_tokens=3, drafter="none", ignore_eos=True).token_ids) == 3
