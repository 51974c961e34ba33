"""What goes between a session's block on a device and the host: its twin, one copy each way, and two landings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import OpError, PlanError
from outrider.plugins.cuda.launches import FAULTS
from outrider.runtime.backends.cuda_driver import PinnedMemory
from outrider.runtime.backends.device_contract import Device
from outrider.runtime.backends.device_layout import Layout
from outrider.runtime.backends.recorder import Recorder
from outrider.runtime.backends.table_changes import TableChanges
from outrider.runtime.backends.token_pool import TokenPool
from outrider.runtime.execution.buffers import Call


@dataclass(frozen=True)
class Block:
    """The small buffers of a session: one block of the device's memory at `address`, and its twin of pinned memory."""

    device: Device
    address: int
    twin: PinnedMemory
    layout: Layout

    def upload(self) -> None:
        part = self.layout.sent
        self.device.to_device(self.address + part.start, self.twin.address + part.start, part.stop - part.start)

    def download(self, to: int | None = None) -> None:
        """Copy what stages write to the twin, or to pinned memory at `to`."""
        part = self.layout.fetched
        there = self.twin.address + part.start if to is None else to
        self.device.to_host(there, self.address + part.start, part.stop - part.start)


class Landing:
    """Pinned memory of the host for what stages write of the small buffers."""

    def __init__(self, block: Block, twins: Mapping[str, NDArray[Any]]) -> None:
        part = block.layout.fetched
        self._memory = memory = block.device.pinned(part.stop - part.start)
        self.address = memory.address
        self.arrays = {
            name: memory.array(offset - part.start, twins[name].shape, twins[name].dtype)
            for name, offset in block.layout.offsets.items()
            if part.start <= offset < part.stop
        }
        own = memory.array(block.layout.status - part.start, (1,), np.int64)
        self._statuses = (own, *statuses_of(self.arrays))

    @property
    def fault(self) -> int:
        return max(int(status.max()) for status in self._statuses)


def statuses_of(arrays: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    return [array for name, array in arrays.items() if name.rpartition(".")[2] == names.STATUS]


_SENT = -1  # the mark of the last upload; those of landings have their numbers


class DeviceExchange:
    """The exchange of a session on a device (`runtime.execution.buffers.Exchange`)."""

    def __init__(
        self,
        block: Block,
        recorder: Recorder | None,
        twins: Mapping[str, NDArray[Any]],
        changes: TableChanges,
        pool: TokenPool,
        marks: dict[int, Any],
        records_engines: bool,
    ) -> None:
        self.records, self.records_engines = recorder is not None, records_engines
        self._block, self._device, self._recorder = block, block.device, recorder
        self._statuses = (block.twin.array(block.layout.status, (1,), np.int64), *statuses_of(twins))
        self.changes = changes
        self.prepare = changes.prepare
        self.take_tokens, self.keep_tokens = pool.take, pool.keep
        self._landings, self._marks, self._landing = [Landing(block, twins) for _ in range(2)], marks, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        assert self._recorder is not None
        self._recorder.recording = True
        try:
            yield
        finally:
            self._recorder.recording = False

    def stretch(self, calls: Sequence[Call], sizes: Sequence[Sequence[int]]) -> Call:
        recorded = _one_after_another(calls) if self._recorder is None else self._recorder.stretch(calls, sizes)

        def run() -> None:
            with self._device.lock():
                recorded()

        return run

    def singly(self, call: Call) -> Call:
        def run() -> None:
            with self._device.lock():
                call()

        return run

    def upload(self) -> None:
        self._block.upload()
        self.changes.put()

    def download(self) -> None:
        self._block.download()

    def land(self) -> int:
        number = 1 - self._landing
        self._wait_for(number)  # of a round that nobody has collected
        with self._device.lock():
            self._block.download(self._landings[number].address)
            self._marks[number] = self._device.mark()
        self._landing = number
        return number

    def landings(self, buffer: str) -> list[NDArray[Any]]:
        return [landing.arrays[buffer] for landing in self._landings]

    def collect(self, landing: int) -> None:
        self._wait_for(landing)
        if fault := self._landings[landing].fault:  # the next upload resets the device's
            raise _refused(fault)

    def sent(self) -> None:
        self._wait_for(_SENT)
        with self._device.lock():
            self._marks[_SENT] = self._device.mark()

    def taken(self) -> None:
        self._wait_for(_SENT)

    def wait_for_launches(self) -> None:
        wait_for_all(self._device, self._marks)

    def _wait_for(self, number: int) -> None:
        if (mark := self._marks.pop(number, None)) is not None:
            self._device.wait_for(mark)

    def settle(self) -> None:
        self.changes.note_all()
        self._finish()

    def _finish(self) -> None:
        with self._device.lock():
            done = self._device.mark()
        self._device.wait_for(done)

    def wait(self) -> None:
        self._finish()
        fault = max(int(status.max()) for status in self._statuses)
        if fault:
            for status in self._statuses:
                status.fill(0)  # which the next upload sends to the device
            raise _refused(fault)


def _refused(fault: int) -> OpError:
    return OpError(f"no token can be chosen: {FAULTS.get(fault, f'fault {fault}')}")


def _one_after_another(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def wait_for_all(device: Device, marks: dict[int, Any]) -> None:
    """Until the device has come to all marks: it may fail, and is left alone then."""
    while marks:
        with suppress(PlanError):
            device.wait_for(marks.popitem()[1])
