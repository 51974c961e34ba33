"""A device on the CPU: memory apart from the host's arrays, our ops' CUDA kernels as fibers, engines on the CPU.

What is the same as on a GPU: where buffers lie, what is copied when, which kernels are launched with which values, and
that nothing of it has happened before somebody has waited: here it happens then, and no earlier.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from outrider.plans.manifest import BackendPlan, Engine
from outrider.runtime.backends import DRIVERS
from outrider.runtime.backends.base import BoundEngine, Driver, LoadedEngine
from outrider.runtime.backends.cuda_driver import Box, PinnedMemory
from outrider.runtime.backends.device import OnDevice
from outrider.runtime.backends.kernel_engines import KernelEngines
from outrider.runtime.backends.one_thread import OneThread
from outrider.runtime.backends.onnxruntime_cuda import DeviceEngine
from outrider.runtime.execution.buffers import Buffers
from tests.plugins.emulator import ANY_THREADS, Emulator


class EmulatedDevice:
    """`copied` counts bytes by direction, `launched` kernels by name."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self.copied = {"up": 0, "down": 0}
        self.replays = 0
        self.enqueued = 0  # work that was no part of a graph
        self._lock, self._holds = threading.RLock(), threading.local()
        self._queue = deque[Callable[[], None]]()
        self._dropped, self._runs = deque[int](), False  # memory to give back; whether a piece of work runs
        self._enqueued, self._done = 0, 0  # pieces of work, since the beginning
        self.graphs = 0  # that were recorded and not given back
        self._recorded: list[Callable[[], None]] | None = None
        self.launched: dict[str, int] = {}

    stream_handle = 0

    @contextmanager
    def lock(self) -> Iterator[None]:
        with self._lock:
            self._holds.depth = getattr(self._holds, "depth", 0) + 1
            try:
                yield
            finally:
                self._holds.depth -= 1

    def allocate(self, size: int) -> int:
        memory = np.zeros(max(size, 1) + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self._memory[address] = memory
        return address

    @property
    def held(self) -> int:
        """Pieces of memory that were allocated and not given back."""
        return len(self._memory)

    def free(self, address: int) -> None:
        """After all that is enqueued. A collection of garbage may ask for it in the midst of a piece of work, or of a
        recording: the next piece of work gives it back."""
        self._dropped.append(address)
        with self._lock:
            if not self._runs and self._recorded is None:
                self._run_until(self._enqueued)

    def pinned(self, size: int) -> PinnedMemory:
        return PinnedMemory(self.allocate(size), size, self.free)

    def to_device(self, address: int, source: int, size: int) -> None:
        self.enqueue(lambda: self._count_and_move("up", address, source, size))

    def to_host(self, to: int, address: int, size: int) -> None:
        self.enqueue(lambda: self._count_and_move("down", to, address, size))

    def copy(self, to: int, source: int, size: int) -> None:
        self.enqueue(lambda: self._count_and_move("across", to, source, size))

    def copy_box(self, to: Box, source: Box, width: int, height: int, depth: int) -> None:
        assert width <= min(to.pitch, source.pitch), "lines overlap"
        assert height <= min(to.lines, source.lines), "layers overlap"

        def run() -> None:
            for layer in range(depth):
                for line in range(height):
                    there, here = (box.address + (layer * box.lines + line) * box.pitch for box in (to, source))
                    self._count_and_move("boxes", there, here, width)

        self.enqueue(run)

    def _count_and_move(self, direction: str, to: int, source: int, size: int) -> None:
        self.copied[direction] = self.copied.get(direction, 0) + size
        ctypes.memmove(to, source, size)

    def mark(self) -> int:
        assert getattr(self._holds, "depth", 0), "this thread does not hold the device"
        assert self._recorded is None, "nothing may be waited for while a graph is recorded"
        return self._enqueued

    def wait_for(self, mark: int) -> None:
        with self._lock:
            self._run_until(mark)

    def _run_until(self, mark: int) -> None:
        assert not self._runs, "work waits for work after it"
        self._runs = True
        try:
            while self._done < (self._enqueued if self._dropped else mark):
                self._done += 1
                self._queue.popleft()()
        finally:
            self._runs = False
        while self._dropped and self._done == self._enqueued:
            del self._memory[self._dropped.popleft()]

    def _append(self, work: Callable[[], None]) -> None:
        self._enqueued += 1
        self._queue.append(work)

    def enqueue(self, work: Callable[[], None]) -> None:
        assert getattr(self._holds, "depth", 0), "this thread does not hold the device"
        if self._recorded is None:
            self.enqueued += 1
            self._append(work)
        else:
            self._recorded.append(work)

    def begin_recording(self) -> None:
        assert self._recorded is None
        self._recorded = []

    def end_recording(self) -> list[Callable[[], None]]:
        assert self._recorded is not None
        recorded, self._recorded = self._recorded, None
        self.graphs += 1
        return recorded

    def abort_recording(self) -> None:
        assert self._recorded is not None
        self._recorded = None

    def discard(self, graph: list[Callable[[], None]]) -> None:
        self.graphs -= 1

    def replay(self, graph: list[Callable[[], None]]) -> None:
        assert getattr(self._holds, "depth", 0), "this thread does not hold the device"
        self.replays += 1

        def run() -> None:
            for work in graph:
                work()

        self._append(run)

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any], shared: int = 0) -> None:
        kept = [type(value)(value.value) for value in values]  # a driver copies them too
        threads = min(threads, 32) if kernel in ANY_THREADS else threads

        def run() -> None:
            self.launched[kernel] = self.launched.get(kernel, 0) + 1
            self._emulator.launch(kernel, blocks, threads, kept, shared)

        self.enqueue(run)


class EagerDevice(EmulatedDevice):
    """Where work is done as soon as it is enqueued: on a GPU it happens at any time in between."""

    def _append(self, work: Callable[[], None]) -> None:
        super()._append(work)
        with self._lock:
            self._run_until(self._enqueued)


@lru_cache(maxsize=64)
def _session(path: Path, _changed: int) -> ort.InferenceSession:
    """What an engine computes, for all runtimes of a plan: to open it takes longer than most tests."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextmanager
def driven(kind: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Have what `make` makes of a backend's section drive it, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRIVERS, kind, Driver(lambda target: None, lambda target, settings: make(target)))
        yield


class EmulatedBackend(OnDevice):
    """The engines of a plan for `onnxruntime-cuda`, on the CPU; with `records_engines`, as TensorRT's would be."""

    def __init__(self, device: EmulatedDevice, *, records: bool = False, records_engines: bool = False) -> None:
        super().__init__(device, records=records, records_engines=records_engines)

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        own = OneThread() if self.records and not self.records_engines else None  # as ONNX Runtime records itself
        return _Enqueued(DeviceEngine(_session(path, path.stat().st_mtime_ns), engine, ("cpu", 0), own), self.device)


class _Enqueued:
    """An engine whose runs are enqueued, with the sizes of the moment."""

    def __init__(self, engine: LoadedEngine, device: EmulatedDevice) -> None:
        self._engine, self._device = engine, device

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        run = self._engine.bind(buffers, bound)
        own = weakref.ref(run)  # a graph holds addresses, and keeps nothing alive

        def enqueue(sizes: list[int]) -> None:
            assert run is own()
            now = sizes.copy()

            def work() -> None:
                found = own()
                assert found is not None, "a graph outlives its session"
                found(now)

            self._device.enqueue(work)

        return enqueue


class EmulatedKernels(OnDevice):
    """The engines of a plan for `cuda`: every kernel is emulated."""

    def __init__(self, plan: BackendPlan, device: EmulatedDevice, *, records: bool = False) -> None:
        super().__init__(device, records=records)
        self.load = KernelEngines(plan, device).load
