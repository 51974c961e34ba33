"""What the host changes of slot tables: a few slots a step, of tables as long as the context.

Changes that are few go up in a list with a step's other data, and a kernel puts them in their places, so that a
recorded round has them too. More are copied before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.backends.device_contract import Device

MOST = 512  # numbers of the list
LIST_BYTES = 8 * (1 + 2 * MOST)
_KERNEL, _THREADS = "outrider_set_numbers", 128


@dataclass(frozen=True)
class TableRow:
    """A row of a slot table: its place in the block of small buffers, in numbers, and the host's side of it."""

    first: int
    host: NDArray[np.int64]


class TableChanges:
    """Changes since the last upload, by model and row; `rows` are those of its tables. The list lies at the beginning
    of the block of small buffers; `listed` is the host's side of it."""

    def __init__(
        self,
        device: Device,
        block: int,
        listed: NDArray[np.int64],
        rows: Mapping[tuple[str, int], Sequence[TableRow]],
    ) -> None:
        self._device, self._block, self._rows = device, block, rows
        self._list = listed
        self._values = [ctypes.c_uint64(block), ctypes.c_uint64(block)]
        self._ranges: dict[tuple[str, int], tuple[int, int]] = {}

    def note(self, model: str, row: int, start: int, stop: int) -> None:
        """The host has changed slots `[start, stop)` of a row of a model's tables."""
        first, last = self._ranges.get((model, row), (start, stop))
        self._ranges[model, row] = min(first, start), max(last, stop)

    def note_all(self) -> None:
        """Nobody knows what the last upload has brought: every slot of every table has changed."""
        self._ranges = {row: (0, len(tables[0].host)) for row, tables in self._rows.items()}

    def prepare(self) -> None:
        """Write the list for the next upload, or copy what is too much for it."""
        count = 0
        if self._ranges:
            parts = [
                (table.first + start, table.host[start:stop])
                for row, (start, stop) in self._ranges.items()
                for table in self._rows[row]
            ]
            if sum(len(part) for _, part in parts) > MOST:
                with self._device.lock():
                    for first, part in parts:
                        self._device.to_device(self._block + 8 * first, part.ctypes.data, part.nbytes)
            else:
                for first, part in parts:
                    stop = count + len(part)
                    self._list[1 + 2 * count : 1 + 2 * stop : 2] = np.arange(first, first + len(part))
                    self._list[2 + 2 * count : 2 + 2 * stop : 2] = part
                    count = stop
            self._ranges.clear()
        self._list[0] = count

    def put(self) -> None:
        """Enqueue the kernel that puts the list, once it is on the device, in its places."""
        self._device.launch(_KERNEL, 1, _THREADS, self._values)
