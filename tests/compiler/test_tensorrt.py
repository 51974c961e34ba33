"""The target `tensorrt` without TensorRT: recipe, graphs with plugins, the builder's settings, and refusals.

The builder is that of TensorRT for RTX (`tensorrt_stand_in.py`); what the graphs compute is tested in
tests/integration/test_inlined_ops.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from rich.console import Console

from outrider.compiler.backends import tensorrt
from outrider.compiler.backends.tensorrt import Gpu, TensorRtBackend
from outrider.compiler.build import build
from outrider.compiler.engines.tensorrt_network import carry_bits
from outrider.compiler.inspect import describe, print_description
from outrider.compiler.recipe import load_recipe
from outrider.plans.errors import PlanError, RecipeError
from outrider.plans.manifest import BackendPlan
from outrider.plans.plan import Plan
from outrider.plugins.cuda import compile as compiling
from outrider.plugins.cuda.compile import CUBINS
from outrider.runtime.backends import tensorrt as driver
from tests.compiler.tensorrt_stand_in import VERSION, stand_in_tensorrt

trt = pytest.importorskip("tensorrt_rtx")

pytestmark = pytest.mark.filterwarnings("ignore:Use :DeprecationWarning")  # TensorRT for RTX has no timing caches
TENSORRT = "tensorrt"
HERE = Gpu("NVIDIA H100", "sm_90")
HEAD = "{name: head, kind: eagle3, checkpoint: head, tree: {top_k: 2, depth: 1, nodes: 4}}"
DRAWN = "{name: drawn, kind: model, checkpoint: drafter, gamma: 2, acceptance: rejection}"


def install(patch: pytest.MonkeyPatch) -> Any:
    """TensorRT's package, on a machine with a GPU; `registered` counts how often plugins were."""
    package = stand_in_tensorrt(trt)
    package.registered = 0

    def register() -> None:
        package.registered += 1

    patch.setitem(sys.modules, TENSORRT, package)
    patch.setattr(tensorrt, "gpu_here", lambda: HERE)
    patch.setattr("outrider.plugins.tensorrt.registration.register_plugins", register)
    return package


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def built(toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan of engines that were really built, their plugins replaced."""
    recipe = load_recipe(toy_recipe, [f"backends=[{TENSORRT}]", f"drafters=[{HEAD}, {DRAWN}]"])
    with pytest.MonkeyPatch.context() as patch:
        package = install(patch)
        patch.setattr(compiling, "_compile", lambda *_: b"for each of four architectures")
        patch.delenv(CUBINS)
        plan = build(recipe, toy_recipe, tmp_path_factory.mktemp("tensorrt") / "plan").plan
    assert package.registered == 1
    return plan


def test_engines_say_who_built_them_and_where_and_every_op_is_a_plugin(built: Plan) -> None:
    plan = built.manifest.backends[TENSORRT]
    for engine in plan.engines.values():
        assert (engine.builder, engine.version_compatible) == (f"tensorrt {VERSION}", False)
        assert (engine.devices, engine.gpu) == (("sm_90",), "NVIDIA H100")
        assert engine.aliases
        assert len(engine.profiles) == 1
    assert built.manifest.tools["gpu"] == "NVIDIA H100, sm_90"
    assert {"tensorrt", "nvidia-cuda-nvrtc", *TensorRtBackend.packages} <= built.manifest.tools.keys()
    reports = {(r.engine, r.rule): r for r in plan.lowering}
    # Mask and acceptance; noise and mask, and then two levels and the tree, or two tokens.
    for engine, count in (("target", 2), ("head", 2 + 2 + 1), ("drawn", 2 + 2)):
        report = reports[engine, "PluginNodes"]
        assert report.applied == count
        assert report.declined.keys() <= {"TensorRT fuses their standard ops"}
        assert reports[engine, "BodyOfDeclined"].applied == sum(report.declined.values())
    console = Console(record=True, width=200)
    print_description(describe(built.root), console)
    text = console.export_text()
    assert f"built by tensorrt {VERSION} for sm_90, NVIDIA H100 alone" in text
    assert "holds BimMask, TreeAccept" in text


def test_ops_beside_engines_are_compiled_for_this_gpu_too(
    library: Any, toy_recipe: Path, built: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(built.manifest.backends[TENSORRT].kernels) == {"sm_80", "sm_90", "sm_100", "sm_120"}
    monkeypatch.setattr(tensorrt, "gpu_here", lambda: Gpu("NVIDIA T4", "sm_75"))
    assert TensorRtBackend(kind=TENSORRT, compute_capabilities=("sm_80",)).architectures == ("sm_80", "sm_75")


# The builder's settings.


def configured(section: TensorRtBackend, cache: Path | None = None) -> tuple[Any, Any]:
    """A real configuration, and what was set that TensorRT for RTX ignores: the level of compatibility."""
    config = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_builder_config()
    ignored: dict[str, Any] = {}

    class Config:
        def __getattr__(self, name: str) -> Any:
            return getattr(config, name)

        def __setattr__(self, name: str, value: Any) -> None:
            ignored[name] = value

    section.configure(section.load(), Config(), cache)
    if cache is not None:
        section.keep(Config(), cache)
    assert ignored.keys() == {"hardware_compatibility_level"}
    return config, *ignored.values()


@pytest.mark.parametrize(
    ("level", "devices", "gpu"),
    [
        ("none", ("sm_90",), "NVIDIA H100"),
        ("same_compute_capability", ("sm_90",), None),
        ("ampere_plus", ("sm_80+",), None),
    ],
)
def test_which_machines_may_run_an_engine(library: Any, level: Any, devices: tuple[str, ...], gpu: str | None) -> None:
    section = TensorRtBackend(kind=TENSORRT, hardware_compatibility=level, version_compatible=gpu is None)
    config, given = configured(section)
    assert given == getattr(trt.HardwareCompatibilityLevel, level.upper())
    flags = trt.BuilderFlag
    assert config.get_flag(flags.VERSION_COMPATIBLE) == config.get_flag(flags.EXCLUDE_LEAN_RUNTIME) == (gpu is None)
    assert not config.get_flag(flags.REQUIRE_USER_ALLOCATION)
    said = section.provenance(library)
    assert (said["devices"], said["gpu"]) == (devices, gpu)


def test_a_timing_cache_is_written_whole_and_one_of_another_version_or_gpu_is_refused(
    library: Any, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.cache"
    section = TensorRtBackend(kind=TENSORRT, timing_cache="kernels.cache")
    for _ in range(2):
        configured(section, path)
        assert path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.cache"]
    path.write_bytes(b"of another")
    read = []

    class Config:
        hardware_compatibility_level = None

        def create_timing_cache(self, data: bytes) -> bytes:
            read.append(data)
            return data

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            return ignore_mismatch

    with pytest.raises(
        PlanError, match=r"kernels\.cache is none of tensorrt 10\.16\S* on this GPU, NVIDIA H100; remove"
    ):
        section.configure(library, Config(), path)
    assert read == [b"of another"]


def test_a_cache_is_no_part_of_a_plan(library: Any, toy_recipe: Path) -> None:
    options = f"backends=[{{kind: {TENSORRT}, timing_cache: kernels.cache}}]"
    with_cache, without = (load_recipe(toy_recipe, [target]) for target in (options, f"backends=[{TENSORRT}]"))
    assert with_cache.resolved() == without.resolved()
    assert with_cache.cache_path(with_cache.backends[0]) == toy_recipe.parent.resolve() / "kernels.cache"
    with pytest.raises(RecipeError, match=r"backends\[0\]\.timing_cache names .*/nowhere/x, which can be no file"):
        load_recipe(toy_recipe, [options.replace("kernels.cache", "nowhere/x")])


def test_bits_that_tensorrt_lacks_are_only_moved() -> None:
    """Ours may read them; a standard op may not calculate with them."""
    draws = ir.Value(name="draws", shape=ir.Shape([1, 4]), type=ir.TensorType(ir.DataType.DOUBLE))
    moved = ir.node("Squeeze", [draws])
    moved.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
    doubled = ir.node("Add", [moved.outputs[0], moved.outputs[0]])
    graph = ir.Graph([draws], moved.outputs, nodes=[moved, doubled])
    model = ir.Model(graph, ir_version=10)
    with pytest.raises(PlanError, match="engine x: Add calculates in DOUBLE, which TensorRT lacks"):
        carry_bits("x", model)
    graph.remove(doubled)
    carry_bits("x", model)
    assert draws.dtype == moved.outputs[0].dtype == ir.DataType.INT64


# Who may load and run what.


@pytest.fixture
def here(library: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with the library and the GPU of the build."""
    monkeypatch.setattr(driver, "architecture", lambda: HERE.architecture)
    monkeypatch.setattr(driver, "device_name", lambda: HERE.name)
    return library


def reason(plan: BackendPlan, **changes: Any) -> str | None:
    engines = {name: engine.model_copy(update=changes) for name, engine in plan.engines.items()}
    return driver.reason_against(driver.TENSORRT, plan.model_copy(update={"engines": engines}))


def test_another_gpu_is_refused_by_name(built: Plan, here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = built.manifest.backends[TENSORRT]
    assert reason(plan) is None
    monkeypatch.setattr(driver, "device_name", lambda: "NVIDIA H200")
    assert "the GPU is NVIDIA H200, and the engine 'target' was built on NVIDIA H100" in str(reason(plan))
    assert reason(plan, gpu=None) is None
    monkeypatch.setattr(driver, "architecture", lambda: "sm_89")
    assert "the GPU is sm_89, and the engine 'target' was built for sm_90" in str(reason(plan, gpu=None))
    assert reason(plan, gpu=None, devices=("sm_80+",)) is None
    monkeypatch.setattr(driver, "architecture", lambda: "sm_75")
    assert "was built for sm_80+" in str(reason(plan, gpu=None, devices=("sm_80+",)))
    monkeypatch.setattr(driver, "architecture", lambda: "sm_110")
    assert "our ops were compiled for sm_80, sm_90" in str(reason(plan, gpu=None, devices=("sm_80+",)))


@pytest.mark.parametrize(
    ("built_by", "compatible", "loads"),
    [
        ("tensorrt 10.15.0.1", False, False),
        ("tensorrt 10.15.0.1", True, True),
        ("tensorrt 10.17.0.1", True, False),
        ("tensorrt 9.9.0.1", True, False),
        (f"tensorrt_rtx {VERSION}", True, False),
        (None, False, False),
    ],
)
def test_another_version_is_refused(built: Plan, here: Any, built_by: str, compatible: bool, loads: bool) -> None:
    said = reason(built.manifest.backends[TENSORRT], builder=built_by, version_compatible=compatible)
    assert (said is None) == loads
    if not loads:
        assert f"was built by {built_by}, and tensorrt {VERSION} is here; build the plan again" in str(said)


def test_a_machine_that_cannot_build_says_so_at_once(toy_recipe: Path, tmp_path: Path, monkeypatch: Any) -> None:
    recipe = load_recipe(toy_recipe, [f"backends=[{TENSORRT}]", "drafters=[]"])
    begun: list[str] = []

    def refused(sentence: str) -> None:
        with pytest.raises(PlanError, match=sentence):
            build(recipe, toy_recipe, tmp_path / "plan", lambda done, total, text: begun.append(text))
        assert begun == []

    monkeypatch.setitem(sys.modules, TENSORRT, None)
    refused(r"needs TensorRT, which cannot be loaded .* run `pip install '\.\[tensorrt\]'` at .*, or leave the backend")
    assert "TensorRT cannot be loaded" in str(driver.reason_against(driver.TENSORRT, BackendPlan.model_construct()))
    package = stand_in_tensorrt(trt)
    monkeypatch.setitem(sys.modules, TENSORRT, package)
    package.__version__ = "10.9.0.34"
    refused(r"needs TensorRT 10\.15 or later, and 10\.9\.0\.34 is here")
    package.__version__ = VERSION
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    refused("is built on the GPU that is to run it, and here is none that can be used")
    install(monkeypatch)

    def register() -> None:
        raise ImportError("plugins are for TensorRT 10.15 or later")

    monkeypatch.setattr("outrider.plugins.tensorrt.registration.register_plugins", register)
    with pytest.raises(PlanError, match=r"the backend tensorrt cannot be built: plugins are for TensorRT 10\.15"):
        TensorRtBackend(kind=TENSORRT).load()
