"""Every feature in every way of asking, as in `test_features.py`, for `onnxruntime-cuda` on an emulated device: memory
apart from the host's, its engines on the CPU, and its kernels as fibers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_features import Doors
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedBackend, EmulatedDevice, driven

pytest.importorskip("cuda.core")


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.fixture(scope="module")
def plan(everything_cuda_plan: Path, device: EmulatedDevice) -> Iterator[Path]:
    with driven(CUDA, lambda target: EmulatedBackend(device)):
        yield everything_cuda_plan


def test_the_device_ran_it(doors: Doors, device: EmulatedDevice) -> None:
    assert {doors.rows.backend, doors.row.backend} == {CUDA}
    assert device.launched["outrider_bim_mask"] > 0
