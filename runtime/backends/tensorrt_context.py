"""An engine of TensorRT bound to a session's memory: an execution context for every size of step that is recorded, and
one of each profile for all others.

What a graph has recorded belongs to its context: that keeps its shapes for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Engine, Profile
from outrider.plugins.tensorrt.log import Log
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.backends.kept_kernels import KeptKernels

Kernels = Callable[[Any], KeptKernels]
"""Makes what keeps the kernels of a runtime cache, and fills the cache with those that were kept."""


class ContextMaker:
    """Makes contexts of one engine; all contexts of a session share `activations` bytes of scratch memory.

    With `kernels`, the library finishes kernels on the GPU that runs them: once for an engine, for the very shapes of
    a context, before these are recorded. They are kept when the first step after new contexts has run, and when the
    engine goes.
    """

    def __init__(self, trt: Any, log: Log, built: Any, engine: Engine, kernels: Kernels | None) -> None:
        self._trt, self._log, self._built, self.engine = trt, log, built, engine
        self._kernels: KeptKernels | None = None
        self._made = False  # contexts, since kernels were saved
        self._config = config = built.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if kernels is not None:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # graphs are ours
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            cache = config.create_runtime_cache()
            self.check(cache is not None, "makes no cache of kernels")
            self._kernels = kernels(cache)
            self.check(config.set_runtime_cache(cache), "keeps no kernels")
            finalize(self, self._kernels.save)

    @property
    def activations(self) -> int:
        """Bytes that the largest profile needs."""
        profiles = range(len(self.engine.profiles))
        return max(int(self._built.get_device_memory_size_for_profile_v2(profile)) for profile in profiles)

    def make(self, profile: int, buffers: DeviceBuffers, bound: dict[str, str], activations: int) -> Any:
        device = buffers.device
        context = self._built.create_execution_context(self._config)
        self.check(context is not None, "makes no context of the engine")
        self._made = True
        # The profile first: it says how much memory is needed.
        self.check(context.set_optimization_profile_async(profile, device.stream_handle), f"has no profile {profile}")
        done = device.mark()
        device.wait_for(done)
        context.set_device_memory(buffers.workspace("activations", activations, False), activations)
        for tensor in (*self.engine.inputs, *self.engine.outputs):
            address = buffers.memory[bound[tensor.name]].address
            self.check(context.set_tensor_address(tensor.name, address), f"refuses the memory of {tensor.name!r}")
        return context

    def check_recordable(self, context: Any, stream: int) -> None:
        """Raise `PlanError` where the context cannot be recorded. TensorRT, which finishes no kernels here, does not
        know the question."""
        if self._kernels is not None and not context.is_stream_capturable(stream):
            raise PlanError(
                f"the engine {self.engine.file} cannot be recorded on this GPU; load the plan with cuda_graphs=False "
                "(--no-cuda-graphs)"
            )

    def ran(self) -> None:
        """A step has run that is not recorded: the kernels of all contexts so far are there."""
        if self._made and self._kernels is not None:
            self._kernels.save()
        self._made = False

    def check(self, went_well: bool, what: str) -> None:
        """Raise `PlanError` with the library's own words where a call of it has failed."""
        if not went_well:
            raise PlanError(f"{self._trt.__name__} {what} ({self.engine.file}): {self._log.said()}")


class BoundEngine:
    """Called with the device's lock held."""

    def __init__(self, maker: ContextMaker, buffers: DeviceBuffers, bound: dict[str, str], activations: int) -> None:
        self._maker, self._buffers, self._bound, self._activations = maker, buffers, bound, activations
        profiles = range(len(maker.engine.profiles))
        self._plain = [maker.make(profile, buffers, bound, activations) for profile in profiles]
        self._shapes: list[list[int]] = [[] for _ in profiles]
        self._recorded: dict[tuple[int, ...], Any] = {}

    def __call__(self, sizes: list[int]) -> None:
        profile = profile_for(self._maker.engine.profiles, sizes)
        if self._buffers.recording:
            context = self._own(profile, sizes)
        else:
            context = self._plain[profile]
            if sizes != self._shapes[profile]:
                self._shapes[profile] = []  # of a context that refuses some of them nothing is known
                self._set_shapes(context, sizes)
                self._shapes[profile] = sizes.copy()
        went_well = context.execute_async_v3(self._buffers.device.stream_handle)
        self._maker.check(went_well, "cannot run the engine")
        if not self._buffers.recording:
            self._maker.ran()

    def _own(self, profile: int, sizes: list[int]) -> Any:
        """The context of these sizes alone: first run plainly, then recorded, then left as it is."""
        key = tuple(sizes)
        if key not in self._recorded:
            context = self._maker.make(profile, self._buffers, self._bound, self._activations)
            self._set_shapes(context, sizes)
            self._maker.check_recordable(context, self._buffers.device.stream_handle)
            self._recorded[key] = context
        return self._recorded[key]

    def _set_shapes(self, context: Any, sizes: list[int]) -> None:
        for tensor in self._maker.engine.inputs:
            if any(isinstance(d, str) for d in tensor.shape):
                shape = shape_of(tensor.shape, sizes)
                self._maker.check(context.set_input_shape(tensor.name, shape), f"refuses {tensor.name!r} {shape}")


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
