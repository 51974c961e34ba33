"""Our own kernels on an NVIDIA GPU: engines are lists of launches, and a step with all its ops is one CUDA graph.

It has run on an H200; tests run it on an emulated device.
"""

from __future__ import annotations

from pathlib import Path

from numpy.typing import DTypeLike

from outrider.plans.manifest import BackendPlan, Engine
from outrider.runtime.backends.base import LoadedEngine, Settings
from outrider.runtime.backends.cuda_driver import CudaDevice, PlanKernels, kernels_reason
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.backends.device_kv import DeviceKv
from outrider.runtime.backends.kernel_engines import KernelEngines
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.kv.memory import KvMemory

_LEAST_CAPABILITY = 80  # its tensor-core instructions are in the kernels


def reason_against(plan: BackendPlan) -> str | None:
    """Why this machine cannot run the backend; None where it can."""
    return kernels_reason(plan.kernels, _LEAST_CAPABILITY)


class Cuda:
    """One device and one stream for all sessions, on which engines and ops run in order."""

    def __init__(self, plan: BackendPlan, settings: Settings) -> None:
        self._records, self._device = settings.cuda_graphs, CudaDevice()
        self._kernels = PlanKernels(self._device, plan.kernels)
        self._engines = KernelEngines(plan, self._device)

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        self._kernels.load(path)
        return self._engines.load(path, engine)

    def kv_memory(self, planes: int, heads: int, slots: int, size: int, dtype: DTypeLike) -> KvMemory:
        return DeviceKv.allocate(self._device, planes, heads, slots, size, dtype)

    def buffers(self, plan: BackendPlan) -> Buffers:
        return DeviceBuffers(plan, self._device, records=self._records, records_engines=True)
