"""A device on the CPU: memory apart from the host's arrays, our ops' CUDA kernels as fibers, engines on the CPU.

What is the same as on a GPU: where buffers lie, what is copied when, which kernels are launched with which values.
What is not: nothing runs while the host goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from plans.manifest import Engine, TargetPlan
from runtime.backends.base import LoadedEngine
from runtime.backends.cuda_driver import Pinned
from runtime.backends.device import DeviceBuffers
from runtime.backends.onnxruntime_cuda import DeviceEngine
from runtime.buffers import Buffers
from tests.plugins.emulator import Emulator


class EmulatedDevice:
    """`copied` counts bytes by direction, `launched` kernels by name."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self.copied = {"up": 0, "down": 0}
        self.launched: dict[str, int] = {}

    def enter(self) -> None:
        pass

    def allocate(self, size: int) -> int:
        memory = np.zeros(max(size, 1) + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def pinned(self, size: int) -> Pinned:
        return Pinned(self.allocate(size), size, self.free)

    def to_device(self, address: int, source: int, size: int) -> None:
        self.copied["up"] += size
        ctypes.memmove(address, source, size)

    def to_host(self, to: int, address: int, size: int) -> None:
        self.copied["down"] += size
        ctypes.memmove(to, address, size)

    def copy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)

    def wait(self) -> None:
        pass

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any]) -> None:
        self.launched[kernel] = self.launched.get(kernel, 0) + 1
        self._emulator.launch(kernel, blocks, min(threads, 32), list(values))


class EmulatedBackend:
    """The engines of a plan for `onnxruntime-cuda`, on the CPU."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        return DeviceEngine(session, engine, ("cpu", 0))

    def buffers(self, plan: TargetPlan) -> Buffers:
        return DeviceBuffers(plan, self._device)
