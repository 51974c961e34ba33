"""The CUDA kernels on a GPU, bound and called as the emulator's are. Without a GPU its tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.plans.errors import PlanError
from outrider.plugins.cuda.compile import compile_kernels
from outrider.plugins.cuda.device_op import DeviceOp
from outrider.plugins.cuda.launches import STATUS
from outrider.runtime.backends.cuda_driver import CudaDevice, architecture
from outrider.tools.lab.gpu.stages import launch


@dataclass(frozen=True)
class Uploaded:
    """An array's copy on the device."""

    address: int
    shape: tuple[int, ...]
    itemsize: int
    dtype: str


class Gpu:
    """The kernels of a source, compiled for this machine's device."""

    def __init__(self, folder: Path, source: str = "kernels.cu") -> None:
        try:
            own = architecture()
        except PlanError as error:
            pytest.skip(str(error))
        cubin = folder / f"{own}.cubin"
        cubin.write_bytes(compile_kernels(own, source))
        self._device = CudaDevice()
        self._device.load_kernels(cubin)

    def create(
        self, op_name: str, tensors: Mapping[str, NDArray[Any]], attributes: Mapping[str, int | float] | None = None
    ) -> Callable[..., int]:
        """A bound op; called with extents, it copies every array there and back, and returns the fault's number."""
        device, spaces = self._device, dict[str, int]()

        def workspace(name: str, size: int, zeroed: bool) -> int:
            spaces[name] = device.allocate(size)
            return spaces[name]

        copies = {n: Uploaded(device.allocate(a.nbytes), a.shape, a.itemsize, a.dtype.name) for n, a in tensors.items()}
        op = DeviceOp(op_name, copies, attributes or {}, workspace)
        status = np.zeros(1, np.int64)

        def call(*extents: int) -> int:
            for name, array in tensors.items():
                device.to_device(copies[name].address, array.ctypes.data, array.nbytes)
            blocks, threads, values = op.values(*extents)
            device.launch(op.launch.kernel, blocks, threads, values)
            for name, array in tensors.items():
                device.to_host(array.ctypes.data, copies[name].address, array.nbytes)
            if STATUS in spaces:
                device.to_host(status.ctypes.data, spaces[STATUS], status.nbytes)
            device.wait()
            return int(status[0])

        return call

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        tensors: Sequence[NDArray[Any] | None],
        numbers: Sequence[int],
        shared: int,
    ) -> None:
        """As `tools.lab.gpu.stages.launch`: arrays are changed in place."""
        launch(self._device, kernel, blocks, threads, tensors, numbers, shared)
