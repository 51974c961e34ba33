"""TensorRT, and TensorRT for RTX: engines on the session's stream, recorded with our ops' kernels, so that a step is
one launch.

Never executed so far: there was no GPU with either.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plans import names
from plans.errors import PlanError
from plans.manifest import Engine, Profile, TargetPlan
from runtime.backends.base import BoundEngine, LoadedEngine, Settings
from runtime.backends.cuda_driver import CudaDevice, architecture, device_name, fitting_kernels
from runtime.backends.device import DeviceBuffers
from runtime.buffers import Buffers


@dataclass(frozen=True)
class Library:
    """One of the two: its package, what it is called, the extra that installs it, and what differs at run time."""

    package: str
    title: str
    extra: str
    records_by_itself: bool
    """Whether it would make CUDA graphs of its own, inside of ours."""


RTX = Library("tensorrt_rtx", "TensorRT for RTX", "tensorrt-rtx", records_by_itself=True)
TENSORRT = Library("tensorrt", "TensorRT", "tensorrt", records_by_itself=False)


def reason_against(library: Library, plan: TargetPlan) -> str | None:
    """Why this machine cannot run the target; None where it can."""
    try:
        trt = importlib.import_module(library.package)
    except ImportError as error:
        return f"{library.title} cannot be loaded ({error}); run `pip install 'outrider[{library.extra}]'`"
    own_version = f"{library.package} {trt.__version__}"
    for name, engine in plan.engines.items():
        if not may_load(engine, own_version):
            return f"the engine {name!r} was built by {engine.builder}, and {own_version} is here; build the plan again"
    try:
        own, gpu = architecture(), device_name()
    except PlanError as error:
        return str(error)
    for name, engine in plan.engines.items():
        if engine.gpu not in (None, gpu):
            return f"the GPU is {gpu}, and the engine {name!r} was built on {engine.gpu} for its like; build it here"
        if not any(runs_on(own, device) for device in engine.devices):
            return f"the GPU is {own}, and the engine {name!r} was built for {', '.join(engine.devices)}"
    if fitting_kernels(own, list(plan.kernels)) is None:
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


class TensorRt:
    """One device and one stream for all sessions."""

    def __init__(self, library: Library, plan: TargetPlan, settings: Settings) -> None:
        self._library, self._records = library, settings.cuda_graphs
        self._trt = importlib.import_module(library.package)
        self._device = CudaDevice()
        fitting = fitting_kernels(architecture(), list(plan.kernels))
        self._cubin = None if fitting is None else plan.kernels[fitting]
        self._log = self._trt.Logger(self._trt.Logger.ERROR)
        self._runtime = self._trt.Runtime(self._log)

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        if self._cubin is not None:  # the plan is where its engines are: engines/TARGET/FILE
            self._device.load_kernels(path.parent.parent.parent / self._cubin)
            self._cubin = None
        own_version = f"{self._library.package} {self._trt.__version__}"
        runtime = self._runtime if engine.builder == own_version else self._older(engine)
        built = runtime.deserialize_cuda_engine(path.read_bytes())
        if built is None:
            raise PlanError(f"{path} cannot be loaded by {own_version}; build the plan again")
        aliases = {
            name: alias
            for name in (built.get_tensor_name(i) for i in range(built.num_io_tensors))
            if (alias := built.get_aliased_input_tensor(name))
        }
        if aliases != engine.aliases:
            raise PlanError(f"{path} updates {aliases} in place, the plan says {engine.aliases}; build the plan again")
        return _LoadedEngine(self._library, self._trt, built, engine, self._device)

    def buffers(self, plan: TargetPlan) -> Buffers:
        return DeviceBuffers(plan, self._device, records=self._records, records_engines=True)

    def _older(self, engine: Engine) -> Any:
        """What loads an engine of an earlier version: that one's lean runtime, which plans, being data, do not hold."""
        assert engine.builder is not None
        version = engine.builder.split(" ")[1]
        file = f"libnvinfer_lean.so.{version.split('.')[0]}"
        runtime = self._runtime.load_runtime(file)
        if runtime is None:
            raise PlanError(
                f"the plan was built by {engine.builder}, whose lean runtime {file} cannot be loaded; put the folder "
                "of that library on LD_LIBRARY_PATH, or build the plan again"
            )
        return runtime


class _LoadedEngine:
    def __init__(self, library: Library, trt: Any, built: Any, engine: Engine, device: CudaDevice) -> None:
        self._library, self._trt, self._built, self._engine, self._device = library, trt, built, engine, device

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        assert isinstance(buffers, DeviceBuffers)
        with self._device.lock():
            contexts = [self._context(index, buffers, bound) for index in range(len(self._engine.profiles))]
        return _BoundEngine(self._engine, contexts, self._device, buffers)

    def _context(self, profile: int, buffers: DeviceBuffers, bound: dict[str, str]) -> Any:
        """What runs the engine in one of its ranges, in memory of the session that all of its contexts share."""
        trt, built = self._trt, self._built
        config = built.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._library.records_by_itself:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        context = built.create_execution_context(config)
        size = built.get_device_memory_size_for_profile_v2(profile)
        context.set_device_memory(buffers.workspace("activations", size, False), size)
        context.set_optimization_profile_async(profile, int(self._device.stream))
        self._device.wait()
        for tensor in (*self._engine.inputs, *self._engine.outputs):
            context.set_tensor_address(tensor.name, buffers.memory[bound[tensor.name]].address)
        return context


class _BoundEngine:
    def __init__(self, engine: Engine, contexts: list[Any], device: CudaDevice, buffers: DeviceBuffers) -> None:
        self._engine, self._contexts, self._device, self._keep = engine, contexts, device, buffers
        self._shapes: list[list[int]] = [[] for _ in contexts]

    def __call__(self, sizes: list[int]) -> None:
        index = profile_for(self._engine.profiles, sizes)
        context = self._contexts[index]
        if sizes != self._shapes[index]:
            for tensor in self._engine.inputs:
                if any(isinstance(d, str) for d in tensor.shape):
                    context.set_input_shape(tensor.name, shape_of(tensor.shape, sizes))
            self._shapes[index] = sizes.copy()
        if not context.execute_async_v3(int(self._device.stream)):
            raise PlanError(f"the engine {self._engine.file} failed on the GPU; build the plan again")


def profile_for(profiles: tuple[Profile, ...], sizes: list[int]) -> int:
    """The first profile whose range of new tokens holds the step's. Raises `PlanError` for none."""
    new = sizes[names.SYMBOLS.index(names.NEW)]
    for index, profile in enumerate(profiles):
        if profile.symbols[names.NEW].least <= new <= profile.symbols[names.NEW].most:
            return index
    raise PlanError(f"a step has {new} new tokens, for which the engine was not built; build the plan again")


def shape_of(shape: tuple[int | str, ...], sizes: list[int]) -> tuple[int, ...]:
    """A tensor's shape in a step. A step without logits computes those of one token, which nothing reads."""
    values = dict(zip(names.SYMBOLS, sizes, strict=True))
    values[names.LOGITS] = max(values[names.LOGITS], 1)
    return tuple(values[d] if isinstance(d, str) else d for d in shape)
