"""TensorRT for RTX: real engines, built without a GPU, of the reference target and its drafters.

What they compute is tested on their graphs (`test_lowering.py`, `test_draft_graph.py`); here, that TensorRT takes
them, with the bindings, the ranges and the cache updates of the plan.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

import outrider.compiler.__main__
from outrider import Runtime
from outrider.compiler.backends.tensorrt_rtx import TensorRtRtxBackend
from outrider.compiler.build import build
from outrider.compiler.checkpoint import load_decoder
from outrider.compiler.engines import tensorrt, tensorrt_network
from outrider.compiler.engines.onnx_file import describe_engine
from outrider.compiler.engines.tensorrt import OnnxFront
from outrider.compiler.export import export_target
from outrider.compiler.lowering import lower
from outrider.compiler.opening import read_config
from outrider.compiler.recipe import load_recipe
from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.errors import PlanError, RecipeError
from outrider.plans.manifest import Profile, Range
from outrider.plans.plan import open_plan
from outrider.runtime.backends import tensorrt as driver
from outrider.runtime.backends import tensorrt_rtx
from outrider.runtime.backends.tensorrt_context import profile_for, shape_of
from tests.compiler.attention_forms import FORMS, Forms, export_forms
from tests.conftest import REFERENCE_RECIPE
from tests.integration.families import TOYS, write_toy

trt = pytest.importorskip("tensorrt_rtx")

RTX = "tensorrt-rtx"
LIMITS = {"N": 100, "T": 1280, "M": 9, "F": 100, "R": 1, "E": 2, "S": 100}


@pytest.mark.long
def test_every_model_of_the_reference_has_an_engine(tmp_path: Path) -> None:
    """By the command of the README."""
    arguments = ["build", str(REFERENCE_RECIPE), "--backend", RTX, "--out", str(tmp_path / "plan")]
    assert outrider.compiler.__main__.main(arguments) == 0
    reference = open_plan(tmp_path / "plan").manifest
    plan = reference.backends[RTX]
    assert set(plan.engines) == {"target", "model", "eagle3", "dspark"}
    for name, engine in plan.engines.items():
        caches = 2 * reference.models[name].layers
        assert engine.layers["KV_CACHE_UPDATE"] == caches
        assert len(engine.aliases) == caches
        assert engine.builder == f"tensorrt_rtx {trt.__version__}"
        assert engine.devices == ("sm_80", "sm_86", "sm_89", "sm_120")
        assert not engine.keeps_levels
        (size,) = (file.size for file in reference.files if file.path == engine.file)
        assert size > engine.weight_bytes / 2
        limits = plan.symbols[name]
        few, many = (profile.symbols for profile in engine.profiles)
        assert (few["N"].least, few["N"].most, many["N"].least, many["N"].most) == (1, 64, 65, limits["N"])
        assert {(each["T"].most, each["M"].most) for each in (few, many)} == {(limits["T"], limits["M"])}


SHORT = ("gemma 2", "smollm 3", "all at once")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FORMS]
)
def test_every_form_of_attention_is_built(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Layers of one window share one mask, whose sums along keys are the engine's only ones."""
    forms, limits = FORMS[name], LIMITS | {"N": 32, "S": 32, "F": 32, "T": 64}
    graph = export_forms(Forms(forms, limits["T"]).to(dtype), limits["T"])
    lower("target", graph, RTX, rows=1)
    section = TensorRtRtxBackend(kind="tensorrt-rtx", compute_capabilities=("sm_80",))
    engine = tensorrt.TensorRtEngines(tmp_path, section, lambda text: None).write("target", graph, limits)
    plain = dtype != torch.float32 and sum(not (form.softcap or form.sinks) for form in forms)
    assert engine.layers.get("CUMULATIVE", 0) == len({form.window for form in forms} - {0})
    assert engine.layers.get("ATTENTION_INPUT", 0) == plain
    assert engine.layers.get("ROTARY_EMBEDDING", 0) == 2 * sum(form.rotated > 0 for form in forms)
    assert engine.layers["KV_CACHE_UPDATE"] == 2 * len(forms)


@pytest.mark.long
def test_quantised_weights_stay_integers_in_the_engine(toy_recipe: Path, tmp_path: Path) -> None:
    """The layers' weights in 4 bits and the tied embedding in 8, which a look-up and the head dequantise each."""
    options = f"{{kind: {RTX}, compute_capabilities: [sm_80]}}"
    recipe = load_recipe(toy_recipe, [f"backends=[{options}]", "drafters=[]", "target.weights={type: int4}"])
    manifest = build(recipe, toy_recipe, tmp_path / "plan").plan.manifest
    plan = manifest.backends[RTX]
    assert plan.engines["target"].layers["DEQUANTIZE"] == 3 * 7 + 2
    assert plan.engines["target"].layers["KV_CACHE_UPDATE"] == 2 * 3
    assert {r.rule: r.applied for r in plan.lowering}["Quantize"] == 3 * 7 + 1


FAMILIES = [name if name == "gemma2" else pytest.param(name, marks=pytest.mark.long) for name in TOYS]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_an_engine(name: str, toy_recipe: Path, tmp_path: Path) -> None:
    """A window is found once a pass, in any number of layers."""
    write_toy(name, tmp_path, toy_recipe.parent / "target")
    options = f"{{kind: {RTX}, compute_capabilities: [sm_80]}}"
    overrides = [f"backends=[{options}]", "drafters=[]", "capacity={context: 160, prefill_chunk: 16}"]
    recipe = tmp_path / "model.yaml"
    built = build(load_recipe(recipe, overrides), recipe, tmp_path / "plan").plan.manifest
    engine, layers = built.backends[RTX].engines["target"], built.target.layers
    windows = set(read_config(tmp_path / "target").windows) - {None}
    assert engine.layers["KV_CACHE_UPDATE"] == 2 * layers
    assert engine.layers.get("CUMULATIVE", 0) == len(windows)


def test_why_a_machine_cannot_run_the_plan(toy_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other reasons are those of `test_tensorrt.py`."""
    options = f"{{kind: {RTX}, compute_capabilities: [sm_80]}}"
    recipe = load_recipe(toy_recipe, [f"backends=[{options}]", "drafters=[]"])
    plan = build(recipe, toy_recipe, tmp_path / "plan").plan.manifest.backends[RTX]
    if driver.reason_against(tensorrt_rtx.RTX, plan) is not None:  # else this machine can
        with pytest.raises(PlanError, match=f"can run here: {RTX}: "):
            Runtime.load(tmp_path / "plan")
    monkeypatch.setattr(driver, "device_name", lambda: "NVIDIA GPU")
    monkeypatch.setattr(driver, "architecture", lambda: "sm_90")
    assert "is sm_90, and the engine 'target' was built for sm_80" in str(driver.reason_against(tensorrt_rtx.RTX, plan))
    monkeypatch.setattr(driver, "architecture", lambda: "sm_80")
    assert driver.reason_against(tensorrt_rtx.RTX, plan) is None
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert "pip install" in str(driver.reason_against(tensorrt_rtx.RTX, plan))
    with pytest.raises(PlanError, match=r"pip install '\.\[tensorrt-rtx\]'"):
        TensorRtRtxBackend(kind=RTX).load()


def test_a_step_runs_in_the_profile_that_holds_its_new_tokens() -> None:
    for most, ranges in ((1, [(1, 1)]), (64, [(1, 64)]), (65, [(1, 64), (65, 65)])):
        profiles = tensorrt.profiles_of(LIMITS | {"N": most})
        assert [(p.symbols["N"].least, p.symbols["N"].most) for p in profiles] == ranges
    profiles = tensorrt.profiles_of(LIMITS)
    sizes = {"N": 1, "T": 128, "M": 0, "R": 1, "E": 2, "S": 1, "F": 100, "B": 1, "D": 1}
    for new, index in ((1, 0), (64, 0), (65, 1), (100, 1)):
        assert profile_for(profiles, [*(sizes | {"N": new}).values()]) == index
    with pytest.raises(PlanError, match="101 new tokens"):
        profile_for(profiles, [*(sizes | {"N": 101}).values()])
    assert shape_of((1, 1, "N", "T"), [*sizes.values()]) == (1, 1, 1, 128)
    assert shape_of(("M", 300), [*sizes.values()]) == (1, 300)


def test_rejection_is_refused(toy_recipe: Path, tmp_path: Path) -> None:
    drafter = "{name: a, kind: model, checkpoint: drafter, gamma: 2, acceptance: rejection}"
    recipe = load_recipe(toy_recipe, [f"backends=[{RTX}]", f"drafters=[{drafter}]"])
    with pytest.raises(
        RecipeError, match=r"drafters\[0\]\.acceptance is rejection, and tensorrt-rtx has no float64, in which it sums"
    ):
        build(recipe, toy_recipe, tmp_path / "plan")


# What a writer checks before it builds.


@pytest.fixture(scope="module")
def lowered(toy_recipe: Path) -> ir.Model:
    graph = export_target(load_decoder(toy_recipe.parent / "target"), 256)
    lower("target", graph, RTX, rows=1)
    return graph


@pytest.fixture
def writer(tmp_path: Path) -> tensorrt.TensorRtEngines:
    section = TensorRtRtxBackend(kind="tensorrt-rtx", compute_capabilities=("sm_80",))
    return tensorrt.TensorRtEngines(tmp_path, section, lambda text: None)


@pytest.fixture
def network(writer: tensorrt.TensorRtEngines, lowered: ir.Model, tmp_path: Path) -> tuple[Any, Any]:
    """The parsed network, and the parser that it lives by."""
    network = writer._builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return network, OnnxFront(trt, writer._log).fill("target", lowered, network, tmp_path)


def test_other_bindings_and_cache_updates_than_the_graphs_are_noticed(
    network: tuple[Any, Any], lowered: ir.Model
) -> None:
    engine = describe_engine(lowered, "engines/x")
    tensorrt_network.check_bindings("target", network[0], engine)
    first = engine.inputs[0].model_copy(update={"dtype": DType.INT32})
    changed = engine.model_copy(update={"inputs": (first, *engine.inputs[1:])})
    with pytest.raises(PlanError, match=r"is int32 .* in the graph, INT64"):
        tensorrt_network.check_bindings("target", network[0], changed)
    fewer = engine.model_copy(update={"outputs": engine.outputs[1:]})
    with pytest.raises(PlanError, match="TensorRT has the outputs"):
        tensorrt_network.check_bindings("target", network[0], fewer)
    tensorrt_network.check_cache_updates(trt, "target", network[0], engine)
    key, value = names.k_cache(0), names.v_cache(0)
    crossed = {names.cache_output(key): value, names.cache_output(value): key}
    with pytest.raises(PlanError, match="updates the caches"):
        tensorrt_network.check_cache_updates(trt, "target", network[0], engine.model_copy(update={"aliases": crossed}))


def test_an_engine_that_cannot_be_built_is_refused_in_the_librarys_words(
    writer: tensorrt.TensorRtEngines, lowered: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here, a range that contradicts a shape: 40 new tokens, and a bias for at most 10 of them."""
    profile = Profile(symbols={symbol: Range(least=40, most=40) for symbol in "NTMF"})
    monkeypatch.setattr(tensorrt, "profiles_of", lambda limits: (profile, profile))
    bias = next(value for value in lowered.graph.inputs if value.name == names.ATTN_BIAS)
    monkeypatch.setattr(bias, "shape", ir.Shape([1, 1, 10, "T"]))
    with pytest.raises(PlanError, match=r"engine target: TensorRT cannot (build|read) it"):
        writer.write("target", lowered, LIMITS)
