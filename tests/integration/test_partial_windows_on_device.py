"""Partial KV of a model with sliding layers on an emulated device: kernels choose blocks as the windows say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider import Runtime
from outrider.compiler.build import build
from outrider.compiler.recipe import load_recipe
from tests.conftest import PARTIAL_KV, made_once
from tests.integration.families import DRAFTERS
from tests.integration.long_context import prompt
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.integration.test_partial_windows import buffered, recipe_of
from tests.integration.test_rtx_graphs import emulated_engines
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice

pytest.importorskip("cuda.core")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("run_ahead")]


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.fixture(scope="module")
def one(toy_recipe: Path, device: EmulatedDevice, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    recipe = recipe_of("gemma3", toy_recipe, tmp_path_factory)
    backends = f"backends=[{{kind: {CUDA}, compute_capabilities: [sm_80]}}]"
    capacity = "capacity={context: 160, prefill_chunk: 16}"
    loaded = load_recipe(recipe, [f"partial_kv={PARTIAL_KV}", capacity, backends])
    plan = made_once(tmp_path_factory, "sliding-gemma3/cuda", lambda out: build(loaded, recipe, out))
    with emulated_engines(device):
        found = Runtime.load(plan)
        yield found
        found.close()


def test_sliding_layers_compute_over_the_partial_cache_what_they_compute_over_the_full_one(
    one: Runtime, device: EmulatedDevice
) -> None:
    ours, theirs = buffered(one, "gemma3", told=True)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    ours, theirs = buffered(one, "gemma3", told=False)
    assert np.abs(ours - theirs).max() > 0.01
    assert device.launched["outrider_block_select"] > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_lossless_mode_changes_no_token(one: Runtime, drafter: str) -> None:
    options = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    plain = one.session().generate(prompt(2, 70), drafter="none", partial_kv="off", **options)  # type: ignore[arg-type]
    found = one.session().generate(prompt(2, 70), drafter=drafter, auto_disable=False, **options)  # type: ignore[arg-type]
    assert found.token_ids == plain.token_ids
    assert found.stats.partial_rounds > 5
