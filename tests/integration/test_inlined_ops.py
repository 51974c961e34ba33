"""The target `tensorrt`, up to TensorRT itself: plans whose engines hold our ops give the tokens of the CPU's.

The graphs are those that TensorRT's parser would get, run with the plugins' own kernels as fibers; programs, buffers
and the device's side of a session are the real ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import outrider.compiler.build
from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.backends.tensorrt import TensorRtBackend
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.plan import Plan
from outrider.runtime.backends import DRIVERS
from outrider.runtime.backends.base import Driver
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.options.options import Options
from outrider.runtime.trace import RoundTrace
from tests.conftest import TOY_RECIPE
from tests.integration.shifting_rule import Shifting
from tests.integration.test_onnxruntime_cuda import (  # noqa: F401  # tests of this backend too
    test_tokens_are_those_of_the_cpu,
    test_turns_of_several_threads_logprobs_and_beams,
)
from tests.plugins.emulator import Emulator
from tests.plugins.tensorrt_stand_in import StandIn
from tests.runtime.emulated_device import EmulatedDevice
from tests.runtime.emulated_tensorrt import EmulatedTensorRt, GraphsInPlaceOfEngines

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

CPU, TENSORRT = "onnxruntime-cpu", "tensorrt"
DRAWN = {"name": "drawn", "kind": "model", "checkpoint": "drafter", "gamma": 3, "acceptance": "rejection"}
PROMPT = [(37 * i) % 299 + 1 for i in range(20)]


@pytest.fixture(scope="module")
def plan(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The toy's plan for the target, graphs in place of engines, and for the CPU. One drafter more draws its chains."""
    drafters = [*yaml.safe_load(TOY_RECIPE)["drafters"], DRAWN]
    return build_plan(toy_recipe, drafters, tmp_path_factory.mktemp("tensorrt") / "plan")


def build_plan(toy_recipe: Path, drafters: list[dict[str, Any]], out: Path, *overrides: str, **options: bool) -> Plan:
    recipe = load_recipe(toy_recipe, [f"backends=[{CPU}, {TENSORRT}]", f"drafters={json.dumps(drafters)}", *overrides])

    with pytest.MonkeyPatch.context() as patch:
        written = lambda backend, folder, *_: GraphsInPlaceOfEngines(folder, **options)  # noqa: E731
        patch.setattr(TensorRtBackend, "open_folder", written)
        patch.setattr(TensorRtBackend, "facts_of_machine", lambda backend: {"gpu": "none"})
        patch.setattr(TensorRtBackend, "architectures", ("sm_90",))
        return outrider.compiler.build.build(recipe, toy_recipe, out).plan


@pytest.fixture(scope="module")
def cpu(plan: Plan) -> Runtime:
    return Runtime.load(plan.root, backend=CPU, threads=1)


@pytest.fixture(scope="module")
def backend(emulator: Emulator, plugin_shells: StandIn) -> EmulatedTensorRt:
    return EmulatedTensorRt(EmulatedDevice(emulator), plugin_shells)


@pytest.fixture
def runtime(plan: Plan, backend: EmulatedTensorRt, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    monkeypatch.setitem(DRIVERS, TENSORRT, Driver(lambda target: None, lambda target, settings: backend))
    return Runtime.load(plan.root, backend=TENSORRT)


def fill_cache(session: Any, number: float) -> None:
    kv, device = session.buffers.memory[names.buffer_name(names.TARGET, names.KV)], session.buffers.device
    filled = np.full(int(np.prod(kv.shape)), number, np.float32)
    with device.lock():
        device.to_device(kv.address, filled.ctypes.data, filled.nbytes)


def test_logits_that_are_not_numbers_are_no_error_where_no_token_is_chosen(runtime: Runtime) -> None:
    session = runtime.session()
    fill_cache(session, np.nan)
    step = session.loop.target_step
    step.begin(3, 3, [5, 6], 0)
    step.append_tip(1)
    session.programs[names.PREFILL].run()
    session.programs[names.BEAM].run()
    with pytest.raises(PlanError, match="contain NaN"):
        session.programs[names.DECODE].run()


@pytest.mark.parametrize("drafter", ["none", "chain", "head"])
def test_rules_are_applied_after_an_engine_that_accepts(runtime: Runtime, cpu: Runtime, drafter: str) -> None:
    """Plainly: the host chooses each token again. And a tree is cut before the engine accepts."""
    for temperature in (0.0, 1.0):
        options = Options(constraint=Shifting(), temperature=temperature, seed=5, max_new_tokens=14, ignore_eos=True)
        expected = cpu.generate(PROMPT, drafter="none", **options)
        found = runtime.generate(PROMPT, drafter=drafter, **options)
        assert found.token_ids == expected.token_ids
        assert found.stats.drafted == 0
    rounds: list[RoundTrace] = []
    options = Options(temperature=0.9, seed=5, max_new_tokens=14, ignore_eos=True, auto_disable=False)
    expected = cpu.generate(PROMPT, drafter="none", **options)
    found = runtime.generate(PROMPT, drafter=drafter, draft_tokens=3, draft_depth=2, on_round=rounds.append, **options)
    assert found.token_ids == expected.token_ids
    assert {len(each.nodes) for each in rounds[1:-4]} <= ({0} if drafter == "none" else {2, 3})


def test_a_target_engine_may_leave_the_ops_around_it_outside(
    toy_recipe: Path, tmp_path: Path, backend: EmulatedTensorRt, cpu: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one has it that Torch-TensorRT has read; the head's engine has its mask inside."""
    head = next(d for d in yaml.safe_load(TOY_RECIPE)["drafters"] if d["name"] == "head")
    plan = build_plan(toy_recipe, [head], tmp_path / "plan", targets_alone=True)
    stages = plan.manifest.backends[TENSORRT].programs[names.speculate("head")].stages
    assert [stage.run for stage in stages][:3] == ["head", "BimMask", "target"]
    assert "TreeAccept" in [stage.run for stage in stages]
    monkeypatch.setitem(DRIVERS, TENSORRT, Driver(lambda target: None, lambda target, settings: backend))
    runtime = Runtime.load(plan.root, backend=TENSORRT)
    options = Options(temperature=0.9, seed=5, max_new_tokens=14, ignore_eos=True, auto_disable=False)
    expected = cpu.generate(PROMPT, drafter="none", **options).token_ids
    for drafter in ("none", "head"):
        assert runtime.generate(PROMPT, drafter=drafter, **options).token_ids == expected
    ours, theirs = (r.beam_search(PROMPT, beams=3, max_new_tokens=6) for r in (runtime, cpu))
    assert [beam.token_ids for beam in ours] == [beam.token_ids for beam in theirs]


def test_chains_that_a_drafter_draws_are_accepted_by_rejection_after_the_engine(runtime: Runtime, cpu: Runtime) -> None:
    """An engine that accepts trees leaves what it made of the chain to the op after it."""
    options = Options(temperature=0.9, seed=3, max_new_tokens=24, ignore_eos=True, drafter="drawn")
    expected = cpu.generate(PROMPT, **options)
    found = runtime.generate(PROMPT, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.accepted > 0


def test_a_round_is_one_launch_of_an_engine_for_each_model_and_the_rows_that_move(
    runtime: Runtime, cpu: Runtime, backend: EmulatedTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rounds of a head are recorded here; what a round without a draft takes is one engine, launched in two parts
    and a copy, a step ahead."""
    device = backend.device
    monkeypatch.setattr(backend, "records", True)
    monkeypatch.setattr(Drafting, "rounds", lambda self, *asked: self.engine_drafters["head"].rounds(*asked))
    runtime.engines.idle.clear()
    session = runtime.session()
    options = Options(max_new_tokens=30, ignore_eos=True, auto_disable=False, temperature=0.7, seed=2)
    for drafter, launched, ran in (
        ("head", {"outrider_set_numbers": 1, "outrider_kv_gather": 1}, {"head": 1, "target": 1}),
        ("none", {"outrider_set_numbers": 1, "outrider_take_tokens": 1, "outrider_keep_tokens": 1}, {"target": 1}),
    ):
        session.reset()
        with closing(session.stream(PROMPT, drafter=drafter, **options)) as stream:
            found = [token for _ in range(2) for token in next(stream).token_ids]
            for _ in range(3):
                device.launched.clear()
                backend.ran.clear()
                replays, enqueued = device.replays, device.enqueued
                found += next(stream).token_ids
                assert (device.launched, backend.ran) == (launched, ran)
                ahead = drafter == "none"
                assert (device.replays, device.enqueued) == (replays + 1 + ahead, enqueued + ahead)
        assert found == cpu.generate(PROMPT, drafter="none", **options).token_ids[: len(found)]


@pytest.fixture(scope="module")
def together(
    toy_recipe: Path, backend: EmulatedTensorRt, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Runtime, Runtime]]:
    """A plan of sixteen sequences in one row, here and on the CPU, with a prefix cache."""
    kept = [each for each in yaml.safe_load(TOY_RECIPE)["drafters"] if each["name"] in ("ngram", "bushy", "head")]
    out = tmp_path_factory.mktemp("together") / "plan"
    plan = build_plan(toy_recipe, [*kept, DRAWN], out, "capacity.branches=16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRIVERS, TENSORRT, Driver(lambda target: None, lambda target, settings: backend))
        here = Runtime.load(plan.root, backend=TENSORRT, prefix_cache=PrefixCacheConfig(max_cached_tokens=512))
        yield here, Runtime.load(plan.root, backend=CPU, threads=1)
        here.close()


def test_several_sequences_in_one_row_the_prefix_cache_and_rejection(together: tuple[Runtime, Runtime]) -> None:
    options = Options(max_new_tokens=12, ignore_eos=True, auto_disable=False, temperature=0.9, seed=5)
    drafters = ["none", "bushy", "head", "ngram"]
    branches = [{"prompt": [7 + place], "drafter": drafter, **options} for place, drafter in enumerate(drafters)]
    here, there = (runtime.generate_branches(PROMPT, branches) for runtime in together)  # type: ignore[arg-type]
    assert [each.token_ids for each in here] == [each.token_ids for each in there]
    assert here[1].stats.drafted > 0
    asked = [([*PROMPT, 7], {"drafter": name, **options}) for name in ("head", "drawn", "none")]
    expected = [together[1].generate(prompt, **own).token_ids for prompt, own in asked]  # type: ignore[arg-type]
    for _ in range(2):
        found = [handle.result() for handle in together[0].submit_all(asked)]  # type: ignore[arg-type]
        assert [each.token_ids for each in found] == expected
    assert all(each.stats.reused_tokens >= len(PROMPT) - 1 for each in found)
