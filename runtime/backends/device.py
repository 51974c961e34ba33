"""A session's buffers on a device: the small ones in one block with a pinned twin on the host, the large ones alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.plans import names
from outrider.plans.buffers import DType
from outrider.plans.check import buffer_shape, session_bytes
from outrider.plans.errors import PlanError
from outrider.plans.manifest import BackendPlan
from outrider.plugins import native
from outrider.plugins.cuda.device_op import DeviceOp
from outrider.plugins.cuda.launches import STATUS
from outrider.runtime.backends.device_contract import Device
from outrider.runtime.backends.device_exchange import Block, DeviceExchange, wait_for_all
from outrider.runtime.backends.device_kv import DeviceKv, KvShape
from outrider.runtime.backends.device_layout import TABLES, UNSEEN, Layout, lay_out
from outrider.runtime.backends.recorder import Recorder
from outrider.runtime.backends.table_changes import LIST_BYTES, TableChanges, TableRow
from outrider.runtime.backends.token_pool import TokenPool
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.kv.memory import KvMemory


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


class DeviceBuffers(Buffers):
    """Programs work on `memory`; `arrays` are the pinned twins of the small buffers, and host rows of large ones."""

    exchange: DeviceExchange

    def __init__(
        self, plan: BackendPlan, device: Device, *, records: bool = True, records_engines: bool = False
    ) -> None:
        self.device = device
        self._addresses = list[int]()
        self._recorder = Recorder(device) if records else None
        marks: dict[int, Any] = {}
        # Before anything is allocated: half a session is given back too.
        finalize(self, _give_back, device, self._recorder, self._addresses, marks).atexit = False
        with device.lock():
            try:
                self._make(plan, lay_out(plan))
                block = Block(device, self._block, self._twin, self._layout)
                pool, changes = self._pool(), self._changes()
                self.exchange = DeviceExchange(
                    block, self._recorder, self.arrays, changes, pool, marks, records_engines
                )
            except PlanError as error:
                raise PlanError(
                    f"a session of this plan needs {session_bytes(plan) / 1e9:.1f} GB on the GPU and on the host, more "
                    f"than there is ({error}); build the plan with a smaller capacity.context"
                ) from None
            made = device.mark()
        device.wait_for(made)

    def _make(self, plan: BackendPlan, layout: Layout) -> None:
        device, self._layout = self.device, layout
        self._block, self._twin = self.allocate(layout.size), device.pinned(layout.size)
        self._status_address = self._block + layout.status
        self._scratch: dict[tuple[str, int], int] = {}
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

    def _changes(self) -> TableChanges:
        """Of the rows of both slot tables of every model."""
        rows: dict[tuple[str, int], tuple[TableRow, ...]] = {}
        for model in (name.rpartition(".")[0] for name in self.memory if name.rpartition(".")[2] == names.BIM):
            tables = [names.buffer_name(model, table) for table in TABLES]
            firsts = [self._layout.offsets[name] // 8 for name in tables]
            for row in range(len(self.arrays[tables[0]])):
                hosts = [self.arrays[name][row] for name in tables]
                rows[model, row] = tuple(
                    TableRow(first + row * len(host), host) for first, host in zip(firsts, hosts, strict=True)
                )
        listed = self._twin.array(0, (LIST_BYTES // 8,), np.int64)
        return TableChanges(self.device, self._block, listed, rows)

    def _pool(self) -> TokenPool:
        """Of the target's branches, for as many tokens as its KV cache has slots."""
        addresses = {
            name: self.memory[names.buffer_name(names.TARGET, name)].address
            for name in (names.TOKEN_IDS, names.POSITIONS, names.BRANCH, names.LOGIT_INDICES, names.COMMITTED)
        }
        (branches,) = self.memory[names.SEED].shape
        slots = self.memory[names.buffer_name(names.TARGET, names.KV)].shape[3]
        return TokenPool(self.device, self.allocate, addresses, branches, slots)

    @property
    def recording(self) -> bool:
        """Whether what runs now comes again, so that an engine that records itself should."""
        return self._recorder is not None and self._recorder.recording

    def allocate(self, size: int) -> int:
        """Memory of the device that is given back with the buffers."""
        self._addresses.append(self.device.allocate(size))
        return self._addresses[-1]

    def _mirror(self, name: str, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
        """The host's side of a large buffer. It reads or writes some rows of few; of the others it sees nothing."""
        model, _, tensor = name.rpartition(".")
        if tensor in UNSEEN or (tensor == names.ATTN_BIAS and model != names.TARGET):
            return np.broadcast_to(np.zeros((), dtype.numpy), shape)  # read-only: nothing is ever here
        if tensor == names.ATTN_BIAS:
            shape = (1, *shape[1:])  # the host writes that of a beam search, which has a row
        return self.device.pinned(prod(shape) * dtype.itemsize).array(0, shape, dtype.numpy)

    def op(self, name: str, bound: Mapping[str, str], attributes: Mapping[str, int | float]) -> native.BoundOp:
        tensors = {parameter: self.memory[buffer] for parameter, buffer in bound.items()}
        op = DeviceOp(name, tensors, attributes, self.workspace)

        def launch(*extents: int) -> None:
            blocks, threads, values = op.values(*extents)
            if blocks:
                self.device.launch(op.launch.kernel, blocks, threads, values)

        return launch

    def workspace(self, name: str, size: int, zeroed: bool) -> int:
        """Programs run one after another, so that stages share what need not stay; a counter has its own."""
        if name == STATUS:
            return self._status_address
        key = (name, -1 if zeroed else size)
        if zeroed or key not in self._scratch:
            self._scratch[key] = self.allocate(size)
            self.scratch_bytes += size
        return self._scratch[key]

    def rows(self, model: str, tensor: str, start: int, stop: int) -> NDArray[Any]:
        name = names.buffer_name(model, tensor)
        memory, rows = self.memory[name], self.arrays[name][start:stop]
        offset = memory.address + start * memory.row_bytes
        with self.device.lock():
            self.device.to_host(rows.ctypes.data, offset, rows.nbytes)
            there = self.device.mark()
        self.device.wait_for(there)
        return rows

    def send(self, model: str, tensor: str, elements: int) -> None:
        name = names.buffer_name(model, tensor)
        memory = self.memory[name]
        with self.device.lock():
            self.device.to_device(memory.address, self.arrays[name].ctypes.data, elements * memory.itemsize)

    def send_rows(self, model: str, tensor: str, start: int, stop: int) -> None:
        name = names.buffer_name(model, tensor)
        memory, rows = self.memory[name], self.arrays[name][start:stop]
        with self.device.lock():
            self.device.to_device(memory.address + start * memory.row_bytes, rows.ctypes.data, rows.nbytes)

    def kv(self, model: str) -> Sequence[KvMemory]:
        whole = self.memory[names.buffer_name(model, names.KV)]
        planes, rows, heads, slots, size = whole.shape
        shape = KvShape(planes, heads, slots, size, rows * heads, whole.dtype.numpy)
        return [DeviceKv(self.device, whole.address + row * heads * slots * shape.line, shape) for row in range(rows)]

    def changed(self, model: str, row: int, start: int, stop: int) -> None:
        self.exchange.changes.note(model, row, start, stop)

    def copy_rows(self, source: tuple[str, str, int], to: tuple[str, str, int], count: int = 1) -> None:
        (a, i), (b, j) = ((self.memory[names.buffer_name(model, tensor)], row) for model, tensor, row in (source, to))
        with self.device.lock():
            self.device.copy(b.address + j * b.row_bytes, a.address + i * a.row_bytes, count * a.row_bytes)


class OnDevice:
    """The part that backends on a device share: one device and one stream for all sessions, on which engines and ops
    run in order. With `records`, rounds are recorded, engines too unless they record themselves."""

    def __init__(self, device: Device, *, records: bool, records_engines: bool = True) -> None:
        self.device, self.records, self.records_engines = device, records, records_engines

    def kv_memory(self, planes: int, heads: int, slots: int, size: int, dtype: DTypeLike) -> KvMemory:
        return DeviceKv.allocate(self.device, planes, heads, slots, size, dtype)

    def buffers(self, plan: BackendPlan) -> Buffers:
        return DeviceBuffers(plan, self.device, records=self.records, records_engines=self.records_engines)


def _give_back(device: Device, recorder: Recorder | None, addresses: list[int], marks: dict[int, Any]) -> None:
    """Free what nothing uses any more."""
    wait_for_all(device, marks)
    if recorder is not None:
        recorder.clear()
    for address in addresses:
        device.free(address)
