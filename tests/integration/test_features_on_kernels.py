"""Every feature in every way of asking, as in `test_features.py`, for the backend `cuda` on an emulated device: memory
apart from the host's, its engines' kernels and those of our ops as fibers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.runtime.backends import BACKENDS, Driver
from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_features import PREFIX, WAYS, Doors, options
from tests.integration.toy_forward import toy_log_probabilities
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice, EmulatedKernels

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.long  # a pass is some hundred kernels of fibers

CUDA = "cuda"


@pytest.fixture(scope="module")
def device(engine_emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(engine_emulator)


@pytest.fixture(scope="module")
def plan(everything_kernel_plan: Path, device: EmulatedDevice) -> Iterator[Path]:
    emulated = Driver(lambda target: None, lambda target, settings: EmulatedKernels(target, device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, CUDA, emulated)
        patch.setitem(BACKENDS, "onnxruntime-cpu", Driver(lambda target: "the tests are for another", None))  # type: ignore[arg-type]
        yield everything_kernel_plan


@pytest.mark.parametrize("way", [way for way in WAYS if way != "server"])
def test_the_tokens_are_those_of_a_numpy_forward(doors: Doors, toy_recipe: Path, way: str) -> None:
    """Which tells tokens of sequences apart that only share a device: each is computed by itself."""
    asked = [options(drafter=drafter, max_new_tokens=12) for drafter in ("none", "chain", "ngram", "head")]
    for place, found in enumerate(doors.ask(way, asked)):
        tokens = [*PREFIX, 7 + place, *found.token_ids]
        forward = toy_log_probabilities(toy_recipe.parent / "target", tokens)
        assert found.token_ids == forward[len(PREFIX) : -1].argmax(-1).tolist()


def test_the_device_ran_it(doors: Doors, device: EmulatedDevice) -> None:
    assert {doors.rows.backend, doors.row.backend} == {CUDA}
    assert device.launched["outrider_attend"] > 0
