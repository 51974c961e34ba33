"""Model families as they are lowered for GPUs, as graphs or to our own kernels, on an emulated device: windows, capped
scores, norms after a block, rotations of a part of each head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import outrider.compiler.lowering as lowering
from outrider import PrefixCacheConfig, Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from tests.conftest import made_once
from tests.integration.families import DRAFTERS, TOYS, write_toy
from tests.integration.long_context import prompt
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.integration.test_rtx_graphs import (
    emulated_engines,
    expect_branches,
    expect_requests_with_the_prefix_cache,
)
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice, EmulatedKernels, driven

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.long  # `test_features_on_device.py` and `test_kernel_engines.py` have the toy in every run

ONE_ROW = ["capacity.batching=false", "capacity.branches=4"]
CACHE = PrefixCacheConfig(max_cached_tokens=512)
PREFIX = prompt(3, 50)  # longer than every window


@pytest.fixture(scope="module", params=[*TOYS])
def recipe(request: pytest.FixtureRequest, toy_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, tokenizer = request.param, toy_recipe.parent / "target"
    return made_once(tmp_path_factory, f"family-{name}", lambda out: write_toy(name, out, tokenizer)) / "model.yaml"


@pytest.fixture(scope="module")
def on_cpu(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """The plan of `test_families`: several rows change no token."""
    loaded = load_recipe(recipe)
    plan = made_once(tmp_path_factory, f"{recipe.parent.name}/plan", lambda out: build(loaded, recipe, out))
    return Runtime.load(plan, threads=1)


@pytest.fixture(scope="module", params=[CUDA, "tensorrt-rtx", "cuda"])
def runtime(request: pytest.FixtureRequest, recipe: Path) -> Runtime:
    """By the recipe, too, so that another one makes another runtime."""
    if request.param == "cuda" and TOYS[recipe.parent.name.removeprefix("family-")].experts:
        pytest.skip("the backend cuda has no kernels for layers of experts, and says so")
    made: Callable[..., Runtime] = request.getfixturevalue("by_kernels" if request.param == "cuda" else "by_graphs")
    return made() if request.param == "cuda" else made(request.param)


@pytest.fixture(scope="module")
def by_kernels(
    recipe: Path, engine_emulator: Emulator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Runtime]]:
    device = EmulatedDevice(engine_emulator)
    with driven("cuda", lambda plan: EmulatedKernels(plan, device, records=True)), ExitStack() as opened:

        def load() -> Runtime:
            loaded = load_recipe(recipe, [*ONE_ROW, "backends=[{kind: cuda, compute_capabilities: [sm_90]}]"])
            name = f"{recipe.parent.name}/kernels"
            plan = made_once(tmp_path_factory, name, lambda out: build(loaded, recipe, out))
            return opened.enter_context(closing(Runtime.load(plan, prefix_cache=CACHE)))

        yield load


@pytest.fixture(scope="module")
def by_graphs(
    recipe: Path, emulator: Emulator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Runtime]]:
    with ExitStack() as opened:

        def load(target: str) -> Runtime:
            loaded = load_recipe(recipe, [*ONE_ROW, f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_90]}}]"])
            name = f"{recipe.parent.name}/{target}"
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(lowering.RULES, CUDA, lowering.RULES[target])
                plan = made_once(tmp_path_factory, name, lambda out: build(loaded, recipe, out))
            opened.enter_context(emulated_engines(EmulatedDevice(emulator), records=True))
            return opened.enter_context(closing(Runtime.load(plan, prefix_cache=CACHE)))

        yield load


def test_branches_with_every_drafter(runtime: Runtime, on_cpu: Runtime) -> None:
    expect_branches(runtime, on_cpu, DRAFTERS, PREFIX)


def test_requests_with_the_prefix_cache(runtime: Runtime, on_cpu: Runtime) -> None:
    expect_requests_with_the_prefix_cache(runtime, on_cpu, DRAFTERS, PREFIX)
