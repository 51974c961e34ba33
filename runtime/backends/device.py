"""A session's buffers on a device: the small ones in one block with a pinned twin on the host, the large ones alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.buffers import DType
from plans.check import buffer_shape
from plans.errors import PlanError
from plans.manifest import TargetPlan
from plugins import native
from plugins.cuda import DeviceOp
from plugins.cuda.launches import FAULTS, STATUS
from runtime.backends.cuda_driver import Pinned
from runtime.backends.recorder import Recorder
from runtime.buffers import Buffers, Call

_ALIGNMENT = 256  # bytes: what kernels may assume of an address
LARGE = frozenset({names.KV, names.ATTN_BIAS, names.LOGITS_OUT, names.FEATURES, names.DRAFT_PROBS})
"""Tensors that stay on the device; the host asks for rows of them, or sends its own."""


class Device(Protocol):
    """What buffers and ops ask of a device: everything enqueued runs in order (`cuda_driver.CudaDevice`)."""

    def enter(self) -> None: ...

    def allocate(self, size: int) -> int: ...

    def free(self, address: int) -> None: ...

    def pinned(self, size: int) -> Pinned: ...

    def to_device(self, address: int, source: int, size: int) -> None: ...

    def to_host(self, to: int, address: int, size: int) -> None: ...

    def copy(self, to: int, source: int, size: int) -> None: ...

    def wait(self) -> None: ...

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any]) -> None: ...

    def begin_recording(self) -> None: ...

    def end_recording(self) -> Any: ...

    def replay(self, graph: Any) -> None: ...

    def discard(self, graph: Any) -> None: ...


@dataclass(frozen=True)
class Memory:
    """A buffer, or a plane of one, on the device."""

    address: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True)
class Layout:
    """Where the small buffers lie in the block: offsets in bytes, and how long it is."""

    offsets: dict[str, int]
    size: int


def lay_out(plan: TargetPlan) -> Layout:
    """All buffers whose tensors are not LARGE, one behind another."""
    offsets, end = {}, 0
    for buffer in plan.buffers:
        if buffer.name.rpartition(".")[2] not in LARGE:
            offsets[buffer.name] = end
            size = prod(buffer_shape(plan, buffer)) * buffer.dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return Layout(offsets, end)


class DeviceBuffers(Buffers):
    """Programs work on `memory`; `arrays` are the pinned twins of the small buffers, and host rows of large ones."""

    def __init__(self, plan: TargetPlan, device: Device, *, records_engines: bool = False) -> None:
        self._device = device
        device.enter()
        layout = lay_out(plan)
        self._addresses = list[int]()
        size = layout.size + _ALIGNMENT  # the last part is the status of our ops
        self._block, self._twin = self.allocate(size), device.pinned(size)
        self._status = self._twin.array(layout.size, (1,), np.int64)
        self._status_address = self._block + layout.size
        self.memory: dict[str, Memory] = {}
        self.arrays = {}
        for buffer in plan.buffers:
            shape, name = buffer_shape(plan, buffer), buffer.name
            if name in layout.offsets:
                address = self._block + layout.offsets[name]
                self.arrays[name] = self._twin.array(layout.offsets[name], shape, buffer.dtype.numpy)
            else:
                address = self.allocate(prod(shape) * buffer.dtype.itemsize)
                self.arrays[name] = self._mirror(name, shape, buffer.dtype)
            self.memory[name] = Memory(address, shape, buffer.dtype)
        for name, view in plan.views.items():
            whole = self.memory[view.buffer]
            self.memory[name] = Memory(whole.address + view.plane * whole.row_bytes, whole.shape[1:], whole.dtype)
            self.arrays[name] = self.arrays[view.buffer]
        recorder = Recorder(device)
        own = [self.arrays[buffer.name] for buffer in plan.buffers if buffer.name.endswith(f".{names.STATUS}")]
        statuses = (self._status, *own)
        self.exchange = _Exchange(device, recorder, self._block, self._twin, statuses, records_engines)
        self._scratch: dict[tuple[str, int], int] = {}
        device.wait()
        finalize(self, _give_back, device, recorder, self._addresses)

    def allocate(self, size: int) -> int:
        """Memory of the device that is given back with the buffers."""
        self._addresses.append(self._device.allocate(size))
        return self._addresses[-1]

    def _mirror(self, name: str, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
        """The host's side of a large buffer. It reads or writes some rows of few; of the others it sees nothing."""
        if name.rpartition(".")[2] in (names.KV, names.FEATURES):
            return np.zeros((0, *shape[1:]), dtype.numpy)
        return self._device.pinned(prod(shape) * dtype.itemsize).array(0, shape, dtype.numpy)

    def op(self, name: str, bound: Mapping[str, str], attributes: Mapping[str, int | float]) -> native.BoundOp:
        tensors = {parameter: self.memory[buffer] for parameter, buffer in bound.items()}
        op = DeviceOp(name, tensors, attributes, self.workspace)

        def launch(*extents: int) -> None:
            blocks, threads, values = op.values(*extents)
            if blocks:
                self._device.launch(op.launch.kernel, blocks, threads, values)

        return launch

    def workspace(self, name: str, size: int, zeroed: bool) -> int:
        """Programs run one after another, so that stages share what need not stay; a counter has its own."""
        if name == STATUS:
            return self._status_address
        key = (name, -1 if zeroed else size)
        if zeroed or key not in self._scratch:
            self._scratch[key] = self.allocate(size)
        return self._scratch[key]

    def rows(self, model: str, tensor: str, start: int, stop: int) -> NDArray[Any]:
        name = names.of(model, tensor)
        memory, rows = self.memory[name], self.arrays[name][start:stop]
        offset = memory.address + start * memory.row_bytes
        self._device.enter()
        self._device.to_host(rows.ctypes.data, offset, rows.nbytes)
        self._device.wait()
        return rows

    def send(self, model: str, tensor: str, elements: int) -> None:
        name = names.of(model, tensor)
        memory = self.memory[name]
        self._device.enter()
        self._device.to_device(memory.address, self.arrays[name].ctypes.data, elements * memory.itemsize)

    def copy_row(self, source: tuple[str, str, int], to: tuple[str, str, int]) -> None:
        (a, i), (b, j) = ((self.memory[names.of(model, tensor)], row) for model, tensor, row in (source, to))
        self._device.enter()
        self._device.copy(b.address + j * b.row_bytes, a.address + i * a.row_bytes, a.row_bytes)


class _Exchange:
    """The small block and its twin, whole: one copy each way (`runtime.buffers.Exchange`)."""

    def __init__(
        self,
        device: Device,
        recorder: Recorder,
        block: int,
        twin: Pinned,
        statuses: Sequence[NDArray[np.int64]],
        records_engines: bool,
    ) -> None:
        self.records_engines = records_engines
        self._device, self._recorder = device, recorder
        self._block, self._twin, self._statuses = block, twin, statuses

    def stretch(self, calls: Sequence[Call], sizes: Sequence[Sequence[int]]) -> Call:
        recorded = self._recorder.stretch(calls, sizes)

        def run() -> None:
            self._device.enter()  # a session may go on in another thread than it began in
            recorded()

        return run

    def upload(self) -> None:
        self._device.to_device(self._block, self._twin.address, self._twin.size)

    def download(self) -> None:
        self._device.to_host(self._twin.address, self._block, self._twin.size)

    def wait(self) -> None:
        self._device.wait()
        fault = max(int(status.max()) for status in self._statuses)
        if fault:
            for status in self._statuses:
                status.fill(0)
            raise PlanError(f"no token can be chosen: {FAULTS.get(fault, f'fault {fault}')}")


def _give_back(device: Device, recorder: Recorder, addresses: list[int]) -> None:
    recorder.clear()
    for address in addresses:
        device.free(address)
