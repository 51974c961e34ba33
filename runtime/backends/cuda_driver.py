"""The CUDA driver, as far as a session needs it: one device, one stream, memory, copies, and our ops' kernels."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.plans.errors import PlanError
from outrider.plans.extras import install
from outrider.plans.manifest import BackendPlan

_OVERLAPPING = 90  # the least compute capability whose kernels may begin while the one before still runs
_FREELY = 48 << 10  # bytes of shared memory that a kernel may have without leave; products and attention ask for more


@cache
def driver() -> Any:
    """`cuda.bindings.driver`, initialised. Raises `PlanError` where there is none, or no device."""
    try:
        from cuda.bindings import driver as cuda
    except (ImportError, OSError) as error:
        raise PlanError(f"cuda-bindings cannot be loaded ({error}); {install('gpu')}") from None
    try:
        (code,) = cuda.cuInit(0)
    except Exception as error:  # of the loader, which finds no driver library
        raise PlanError(
            f"there is no NVIDIA driver ({error}); install it, or build the plan for onnxruntime-cpu too"
        ) from None
    if code != cuda.CUresult.CUDA_SUCCESS:
        raise PlanError(f"the NVIDIA driver cannot be used ({code.name})")
    (code, count) = cuda.cuDeviceGetCount()
    if code != cuda.CUresult.CUDA_SUCCESS or count == 0:
        raise PlanError("there is no NVIDIA GPU; build the plan for onnxruntime-cpu too")
    return cuda


def call(function: str, *arguments: Any) -> Any:
    """Call the driver's `function`, and return its results. Raises `PlanError` with its own words where it fails."""
    cuda = driver()
    code, *results = getattr(cuda, function)(*arguments)
    if code != cuda.CUresult.CUDA_SUCCESS:
        _, text = cuda.cuGetErrorString(code)
        said = text.decode() if isinstance(text, bytes) else str(text)
        raise PlanError(f"the GPU failed: {function}: {code.name}, {said}")
    return results[0] if len(results) == 1 else results or None


def architecture(ordinal: int = 0) -> str:
    """The device's compute capability, such as sm_90. Raises `PlanError` where there is no device."""
    major, minor = (_attribute(f"COMPUTE_CAPABILITY_{part}", ordinal) for part in ("MAJOR", "MINOR"))
    return f"sm_{major}{minor}"


def _attribute(name: str, ordinal: int) -> int:
    own = getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call("cuDeviceGetAttribute", own, call("cuDeviceGet", ordinal)))


def device_name(ordinal: int = 0) -> str:
    """NVIDIA's name of the device. Raises `PlanError` where there is none."""
    driver()
    name: bytes = call("cuDeviceGetName", 256, call("cuDeviceGet", ordinal))
    return name.split(b"\0")[0].decode()


def driver_version() -> str:
    """The version of CUDA that the driver has, such as 13.0. Raises `PlanError` where there is none."""
    driver()
    version: int = call("cuDriverGetVersion")
    return f"{version // 1000}.{version % 1000 // 10}"


def fitting_kernels(own: str, available: Sequence[str]) -> str | None:
    """Choose the architecture of compiled kernels that runs on `own`: the same major version, and no
    later a minor one. None where there is none."""
    fits = [one for one in available if one[:-1] == own[:-1] and int(one[-1]) <= int(own[-1])]
    return max(fits, default=None)


def kernels_reason(plan: BackendPlan | None, least: int = 0) -> str | None:
    """Say why none of the plan's kernels, or with None why no plan's, runs on the device; None where one does.

    `least` is the least compute capability that the backend can be built for, such as 80.
    """
    try:
        own = architecture()
    except PlanError as error:
        return str(error)
    if int(own.removeprefix("sm_")) < least:
        return f"the GPU is {own}, and this backend needs compute capability {least // 10}.{least % 10} or later"
    if plan is not None and fitting_kernels(own, list(plan.kernels)) is None:
        return (
            f"the GPU is {own}, and our kernels were compiled for {', '.join(plan.kernels)}; add {own} to "
            "compute_capabilities of the backend in the recipe, and build again"
        )
    return None


class PlanKernels:
    """The kernels of a plan that run on a device, loaded with the first engine. Raises `PlanError` for none."""

    def __init__(self, device: CudaDevice, plan: BackendPlan) -> None:
        fitting = fitting_kernels(architecture(), list(plan.kernels))
        if fitting is None:
            raise PlanError(str(kernels_reason(plan)))
        self._device, self._file = device, plan.kernels[fitting]
        self._loaded = False

    def load(self, engine: Path) -> None:
        """Load them, if they are not there yet; `engine` is any engine of the plan."""
        if not self._loaded:  # the plan is where its engines are: engines/BACKEND/FILE
            self._device.load_kernels(engine.parent.parent.parent / self._file)
            self._loaded = True


@dataclass(frozen=True)
class Box:
    """Lines of bytes from `address` on, `pitch` bytes apart, in layers that are `lines` of them apart."""

    address: int
    pitch: int
    lines: int


class CudaDevice:
    """A device's primary context and one stream on it, on which everything runs in order.

    What enqueues is called with the lock held (`lock`). What a finaliser gives back, in any thread, waits for
    the next holder: no memory's finaliser waits for the lock. Raises `PlanError` where the driver fails.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._events = list[Any]()
        self._dropped = deque[tuple[str, Any]]()  # driver functions to call, and with what
        self._modules = list[Any]()
        self._threads = threading.local()
        self._context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))
        self._lock = threading.RLock()
        with self.lock():
            self.stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        held = (ordinal, self._context, self.stream, self._modules, self._events, self._dropped)
        finalize(self, _close, *held).atexit = False  # a process that ends gives everything back

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the device, with its context entered: a session may continue in another thread than it began in."""
        with self._lock:
            self._enter()
            _drain(self._dropped)
            yield

    @property
    def stream_handle(self) -> int:
        """The stream as libraries take it."""
        return int(self.stream)

    def _enter(self) -> None:
        """Calls of this thread are for this device, and leave alone what other threads record, ONNX Runtime's too."""
        call("cuCtxSetCurrent", self._context)
        if not getattr(self._threads, "relaxed", False):
            relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            call("cuThreadExchangeStreamCaptureMode", relaxed)
            self._threads.relaxed = True

    def allocate(self, size: int) -> int:
        """The address of `size` bytes of zeros."""
        with self.lock():
            address = int(call("cuMemAlloc", max(size, 1)))
            call("cuMemsetD8Async", address, 0, max(size, 1), self.stream)
        return address

    def free(self, address: int) -> None:
        self._drop("cuMemFree", address)

    def _drop(self, function: str, what: Any) -> None:
        """Give something back, now or by the next holder of the device."""
        self._dropped.append((function, what))
        if self._lock.acquire(blocking=False):
            try:
                self._enter()
                _drain(self._dropped)
            finally:
                self._lock.release()

    def pinned(self, size: int) -> PinnedMemory:
        """Zeros on the host, which the device copies from and to by itself."""
        with self.lock():
            return PinnedMemory(int(call("cuMemHostAlloc", max(size, 1), 0)), size, self._unpin)

    def _unpin(self, address: int) -> None:
        self._drop("cuMemFreeHost", address)

    def to_device(self, address: int, source: int, size: int) -> None:
        call("cuMemcpyHtoDAsync", address, source, size, self.stream)

    def to_host(self, to: int, address: int, size: int) -> None:
        call("cuMemcpyDtoHAsync", to, address, size, self.stream)

    def copy(self, to: int, source: int, size: int) -> None:
        call("cuMemcpyDtoDAsync", to, source, size, self.stream)

    def copy_box(self, to: Box, source: Box, width: int, height: int, depth: int) -> None:
        """Copy `depth` times `height` lines of `width` bytes; each box is the device's memory, or pinned memory."""
        box = driver().CUDA_MEMCPY3D()
        box.srcMemoryType = box.dstMemoryType = driver().CUmemorytype.CU_MEMORYTYPE_UNIFIED
        box.srcDevice, box.srcPitch, box.srcHeight = source.address, source.pitch, source.lines
        box.dstDevice, box.dstPitch, box.dstHeight = to.address, to.pitch, to.lines
        box.WidthInBytes, box.Height, box.Depth = width, height, depth
        call("cuMemcpy3DAsync", box, self.stream)

    def mark(self) -> Any:
        """An event after all that is enqueued."""
        if not self._events:
            self._events.append(call("cuEventCreate", driver().CUevent_flags.CU_EVENT_DISABLE_TIMING))
        event = self._events.pop()
        call("cuEventRecord", event, self.stream)
        return event

    def wait_for(self, mark: Any) -> None:
        """Until the device has come to `mark`, which is not to be used again. Needs no lock."""
        self._enter()
        call("cuEventSynchronize", mark)
        self._events.append(mark)

    def timed_mark(self) -> Any:
        """A point of the order that `milliseconds` can be asked of, once the device has come to it."""
        with self.lock():
            event = call("cuEventCreate", driver().CUevent_flags.CU_EVENT_DEFAULT)
            call("cuEventRecord", event, self.stream)
        return event

    def milliseconds(self, first: Any, second: Any) -> float:
        """The device's own time between two points, which are not to be used again."""
        call("cuEventSynchronize", second)
        found = float(call("cuEventElapsedTime", first, second))
        for event in (first, second):
            call("cuEventDestroy", event)
        return found

    def wait(self) -> None:
        """For all that is enqueued."""
        with self.lock():
            now = self.mark()
        self.wait_for(now)

    def begin_recording(self) -> None:
        """From here on, what is enqueued is recorded instead of run. Memory may be freed meanwhile: it is not ours."""
        call("cuStreamBeginCapture", self.stream, driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def end_recording(self) -> Any:
        """The recorded graph, ready to `replay`."""
        graph = call("cuStreamEndCapture", self.stream)
        try:
            return call("cuGraphInstantiate", graph, 0)
        finally:
            call("cuGraphDestroy", graph)

    def abort_recording(self) -> None:
        """End a recording that failed: what went wrong is reported already."""
        code, graph = driver().cuStreamEndCapture(self.stream)
        if code == driver().CUresult.CUDA_SUCCESS:
            driver().cuGraphDestroy(graph)

    def replay(self, graph: Any) -> None:
        call("cuGraphLaunch", graph, self.stream)

    def discard(self, graph: Any) -> None:
        self._drop("cuGraphExecDestroy", graph)

    def load_kernels(self, cubin: Path) -> None:
        """Our ops' kernels, for `launch`."""
        with self.lock():
            self._modules.append(call("cuModuleLoadData", cubin.read_bytes()))
        self._functions: dict[str, Any] = {}
        self._shared: dict[str, int] = {}  # the most of a launch that a kernel may have so far
        self._launch = _launch_on(self.stream, self.ordinal)
        self._multiprocessors = _attribute("MULTIPROCESSOR_COUNT", self.ordinal)
        # Of a kernel that begins early, blocks go to where there is room, two to one multiprocessor, none to another,
        # unless each asks for more than half of its shared memory.
        shared = _attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", self.ordinal)
        self._apart = shared // 2 + 1 if self._launch.numAttrs else 0

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any], shared: int = 0) -> None:
        """Enqueue `kernel`; `values` are ctypes numbers, in the order of its parameters.

        A block has `shared` bytes of dynamic shared memory.
        """
        if kernel not in self._functions:
            self._functions[kernel] = call("cuModuleGetFunction", self._modules[-1], kernel.encode())
        if shared > _FREELY and blocks <= self._multiprocessors:
            shared = max(shared, self._apart)
        if shared > self._shared.get(kernel, 0):  # more than 48 KiB, the kernel's own included, need leave
            most = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", self._functions[kernel], most, shared)
            self._shared[kernel] = shared
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launch.gridDimX, self._launch.blockDimX, self._launch.sharedMemBytes = blocks, threads, shared
        call("cuLaunchKernelEx", self._launch, self._functions[kernel], ctypes.addressof(parameters), 0)


def _launch_on(stream: Any, ordinal: int) -> Any:
    """What kernels on `stream` are launched with, but for their sizes.

    They may begin while the one before still runs, where the device can do that: `follow` of `csrc/cuda/block.h` waits.
    """
    cuda = driver()
    launch = cuda.CUlaunchConfig()
    launch.hStream = stream
    launch.gridDimY = launch.gridDimZ = launch.blockDimY = launch.blockDimZ = 1
    if int(architecture(ordinal).removeprefix("sm_")) >= _OVERLAPPING:
        early = cuda.CUlaunchAttribute()
        early.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        allowed = cuda.CUlaunchAttributeValue()
        allowed.programmaticStreamSerializationAllowed = 1
        early.value = allowed
        launch.attrs, launch.numAttrs = [early], 1
    return launch


def _drain(dropped: deque[tuple[str, Any]]) -> None:
    while dropped:
        function, what = dropped.popleft()
        call(function, what)


def _close(
    ordinal: int, context: Any, stream: Any, modules: list[Any], events: list[Any], dropped: deque[tuple[str, Any]]
) -> None:
    """Give back what a device has left, in any thread: nobody uses it any more."""
    call("cuCtxSetCurrent", context)
    call("cuStreamSynchronize", stream)
    _drain(dropped)
    for event in events:
        call("cuEventDestroy", event)
    for module in modules:
        call("cuModuleUnload", module)
    call("cuStreamDestroy", stream)
    call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", ordinal))


class PinnedMemory:
    """Bytes of the host at a fixed address, and arrays in them; `release` gets it when the last of them is gone."""

    def __init__(self, address: int, size: int, release: Callable[[int], None]) -> None:
        self.address, self.size = address, size
        memory = (ctypes.c_uint8 * max(size, 1)).from_address(address)
        finalize(memory, release, address)
        self._bytes = np.ctypeslib.as_array(memory)
        self._bytes.fill(0)

    def array(self, offset: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = prod(shape) * np.dtype(dtype).itemsize
        return self._bytes[offset : offset + size].view(dtype).reshape(shape)
