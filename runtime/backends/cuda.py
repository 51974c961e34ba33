"""Our own kernels on an NVIDIA GPU: engines are lists of launches, and a step with all its ops is one CUDA graph.

It has run on an H200; tests run it on an emulated device.
"""

from __future__ import annotations

from pathlib import Path

from outrider.plans.manifest import BackendPlan, Engine
from outrider.runtime.backends.base import Driver, LoadedEngine, Settings
from outrider.runtime.backends.cuda_driver import CudaDevice, PlanKernels, kernels_reason
from outrider.runtime.backends.device import OnDevice
from outrider.runtime.backends.kernel_engines import KernelEngines

_LEAST_CAPABILITY = 80  # its tensor-core instructions are in the kernels


def reason_against(plan: BackendPlan | None) -> str | None:
    """Why this machine cannot run the plan, or any; None where it can."""
    return kernels_reason(plan, _LEAST_CAPABILITY)


class Cuda(OnDevice):
    def __init__(self, plan: BackendPlan, settings: Settings) -> None:
        device = CudaDevice()
        super().__init__(device, records=settings.cuda_graphs)
        self._kernels = PlanKernels(device, plan)
        self._engines = KernelEngines(plan, device)

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        self._kernels.load(path)
        return self._engines.load(path, engine)


DRIVER = Driver(reason_against, Cuda)
