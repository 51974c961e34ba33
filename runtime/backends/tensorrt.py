"""TensorRT, and TensorRT for RTX: engines on the session's stream, recorded with our ops' kernels: a step with a draft
is one launch, one that decodes plainly is two and a copy.

Never executed so far: there was no GPU with either.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from outrider.plans.errors import PlanError
from outrider.plans.extras import install
from outrider.plans.manifest import BackendPlan, Engine
from outrider.plugins.tensorrt.log import make_log
from outrider.runtime.backends import base
from outrider.runtime.backends.base import Driver, LoadedEngine, Settings
from outrider.runtime.backends.cuda_driver import (
    CudaDevice,
    PlanKernels,
    architecture,
    device_name,
    driver_version,
    fitting_kernels,
)
from outrider.runtime.backends.device import DeviceBuffers, OnDevice
from outrider.runtime.backends.kept_kernels import KeptKernels, kernel_file
from outrider.runtime.backends.tensorrt_context import BoundEngine, ContextMaker, Kernels
from outrider.runtime.execution.buffers import Buffers


@dataclass(frozen=True)
class Library:
    """One of the two: its package, what it is called, the extra that installs it, and what differs at run time."""

    package: str
    title: str
    extra: str
    jit: bool
    """Whether it finishes kernels on the GPU that runs them, and would make CUDA graphs of its own inside of ours."""


TENSORRT = Library("tensorrt", "TensorRT", "tensorrt", jit=False)


def reason_against(library: Library, plan: BackendPlan | None) -> str | None:
    """Why this machine cannot run the plan, or any; None where it can."""
    try:
        trt = importlib.import_module(library.package)
    except (ImportError, OSError) as error:  # the second where a library of its own is missing
        return f"{library.title} cannot be loaded ({error}); {install(library.extra)}"
    own_version = f"{library.package} {trt.__version__}"
    engines = {} if plan is None else plan.engines
    for name, engine in engines.items():
        if not may_load(engine, own_version):
            return f"the engine {name!r} was built by {engine.builder}, and {own_version} is here; build the plan again"
    try:
        own, gpu = architecture(), device_name()
    except PlanError as error:
        return str(error)
    for name, engine in engines.items():
        if engine.gpu not in (None, gpu):
            return f"the GPU is {gpu}, and the engine {name!r} was built on {engine.gpu} for its like; build it here"
        if not any(runs_on(own, device) for device in engine.devices):
            return f"the GPU is {own}, and the engine {name!r} was built for {', '.join(engine.devices)}"
    if plan is not None and fitting_kernels(own, list(plan.kernels)) is None:
        return f"the GPU is {own}, and our ops were compiled for {', '.join(plan.kernels)}"
    return None


def may_load(engine: Engine, own: str) -> bool:
    """Whether the library `own`, its package and version, may load what `engine.builder` has built."""
    if engine.builder == own or engine.builder is None:
        return engine.builder == own
    (package, built), (own_package, here) = engine.builder.split(" "), own.split(" ")
    if package != own_package or not engine.version_compatible:
        return False
    older, newer = ([int(part) for part in version.split(".")] for version in (built, here))
    return older[0] == newer[0] and older <= newer


def runs_on(own: str, device: str) -> bool:
    """Whether a GPU of capability `own` is one of `device`: sm_80 is that alone, sm_80+ all from it on."""
    if device.endswith("+"):
        return int(own.removeprefix("sm_")) >= int(device.removeprefix("sm_")[:-1])
    return own == device


class TensorRt(OnDevice):
    def __init__(self, library: Library, plan: BackendPlan, settings: Settings) -> None:
        device = CudaDevice()
        super().__init__(device, records=settings.cuda_graphs)
        self._library, self._trt = library, importlib.import_module(library.package)
        self._cubin = PlanKernels(device, plan)
        self._log = make_log(self._trt)
        self._runtime = self._trt.Runtime(self._log)
        self.activations = 0  # bytes of scratch memory that any engine needs

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        self._cubin.load(path)
        own_version = f"{self._library.package} {self._trt.__version__}"
        runtime = self._runtime if engine.builder == own_version else self._older(engine)
        built = runtime.deserialize_cuda_engine(path.read_bytes())
        if built is None:
            raise PlanError(f"{path} cannot be loaded by {own_version} ({self._log.said()}); build the plan again")
        aliases = {
            name: alias
            for name in (built.get_tensor_name(i) for i in range(built.num_io_tensors))
            if (alias := built.get_aliased_input_tensor(name))
        }
        if aliases != engine.aliases:
            raise PlanError(f"{path} updates {aliases} in place, the plan says {engine.aliases}; build the plan again")
        maker = ContextMaker(self._trt, self._log, built, engine, self._kernels(path))
        self.activations = max(self.activations, maker.activations)
        return _LoadedEngine(maker, self)

    def _kernels(self, engine: Path) -> Kernels | None:
        """What keeps the kernels of the engine at `engine`, if the library compiles any here."""
        if not self._library.jit:
            return None
        conditions = {
            "library": f"{self._library.package} {self._trt.__version__}",
            "gpu": device_name(),
            "architecture": architecture(),
            "driver": driver_version(),
        }
        file = kernel_file(engine, conditions)
        return lambda cache: KeptKernels(cache, file)

    def _older(self, engine: Engine) -> Any:
        """The loader of an engine of an earlier version: its lean runtime, which plans, being data, do not hold."""
        assert engine.builder is not None
        version = engine.builder.split(" ")[1]
        file = f"libnvinfer_lean.so.{version.split('.')[0]}"
        runtime = self._runtime.load_runtime(file)
        if runtime is None:
            raise PlanError(
                f"the plan was built by {engine.builder}, whose lean runtime {file} cannot be loaded; put the folder "
                "of that library on LD_LIBRARY_PATH, or build the plan again "
                f"({self._log.said()})"
            )
        return runtime


class _LoadedEngine:
    def __init__(self, maker: ContextMaker, owner: TensorRt) -> None:
        self._maker, self._owner = maker, owner

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> base.BoundEngine:
        assert isinstance(buffers, DeviceBuffers)
        with buffers.device.lock():
            return BoundEngine(self._maker, buffers, bound, self._owner.activations)


DRIVER = Driver(partial(reason_against, TENSORRT), partial(TensorRt, TENSORRT))
