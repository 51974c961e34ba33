"""Every feature in every way of asking, as in `test_features.py`, over graphs as they are lowered for `tensorrt-rtx`.

They run on an emulated device, recorded as that backend records its engines. What it refuses is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_features import *  # noqa: F403  # the tests, and the fixture `doors`
from tests.integration.test_features import Doors
from tests.integration.test_onnxruntime_cuda import CUDA
from tests.integration.test_rtx_graphs import emulated_engines, rtx_graphs_plan  # noqa: F401  # a fixture
from tests.plugins.emulator import Emulator
from tests.runtime.emulated_device import EmulatedDevice

pytest.importorskip("cuda.core")
pytestmark = pytest.mark.long  # as on the other emulated device; `test_rtx_graphs.py` has what is this backend's own


@pytest.fixture(scope="module")
def left_out() -> dict[str, str]:
    """As `compiler/design.py` refuses it."""
    return {
        "rows": "tensorrt-rtx appends as many slots to every row of a KV cache: its plans have one row",
        "partial_kv": "tensorrt-rtx has no partial KV",
        "rejection": "acceptance by rejection sums in float64, which TensorRT does not have",
    }


@pytest.fixture(scope="module")
def device(emulator: Emulator) -> EmulatedDevice:
    return EmulatedDevice(emulator)


@pytest.fixture(scope="module")
def plan(rtx_graphs_plan: Path, device: EmulatedDevice) -> Iterator[Path]:  # noqa: F811
    with emulated_engines(device):
        yield rtx_graphs_plan


def test_the_device_ran_it(doors: Doors, device: EmulatedDevice) -> None:
    assert {doors.rows.backend, doors.row.backend} == {CUDA}
    assert device.launched["outrider_bim_mask"] > 0
    assert device.replays > 0
