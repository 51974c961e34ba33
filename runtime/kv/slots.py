"""The slot table of a model's KV cache: which branch and position each committed slot belongs to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.step import Step

FIRST = 0  # number of a sequence that is the only one
EMPTY = -2  # a slot that belongs to no branch
SHARED = -1  # one that all branches see


class SlotTable:
    """Slots [0, length) of one row of the KV cache are committed; those after them hold garbage that nothing reads.

    Owner of `length`, and of that row of its model's buffers `bim` and `slot_positions`.
    """

    def __init__(self, model: str, buffers: Buffers, step: Step, row: int = 0) -> None:
        self._step, self._buffers, self._model, self._row = step, buffers, model, row
        self._bim = buffers.array(model, names.BIM)[row]
        self._positions = buffers.array(model, names.SLOT_POSITIONS)[row]
        self._bim.fill(EMPTY)
        self._changed(0, len(self._bim))
        self.length = 0

    def _changed(self, start: int, stop: int) -> None:
        self._buffers.changed(self._model, self._row, start, stop)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Owner of each committed slot: a branch's number, SHARED or EMPTY."""
        owners: NDArray[np.int64] = self._bim[: self.length]
        return owners

    def commit(self, count: int, kept: NDArray[np.int64] | None, owner: int | None = None) -> None:
        """Take `count` tokens of the step: the first ones, or those `kept` lists, whose KV KvGather has moved there.

        They belong to the step's branches, or to `owner`.
        """
        step, start, stop = self._step, self.length, self.length + count
        if count == 1:  # scalar stores cost a tenth of slice stores
            first = 0 if kept is None else int(kept[0])
            self._bim[start] = step.branch[first]
            self._positions[start] = step.positions[first]
        elif kept is not None:
            np.take(step.branch, kept[:count], out=self._bim[start:stop], mode="clip")
            np.take(step.positions, kept[:count], out=self._positions[start:stop], mode="clip")
        else:
            self._bim[start:stop] = step.branch[:count]
            self._positions[start:stop] = step.positions[:count]
        if owner is not None:
            self._bim[start:stop] = owner
        self._changed(start, stop)
        self.length = stop

    def copy(self, other: SlotTable, length: int) -> None:
        """Copy the first slots of another row, whose KV has been copied here."""
        self._bim[:length] = other._bim[:length]
        self._positions[:length] = other._positions[:length]
        self._changed(0, length)
        self.length = length

    def release(self, branch: int, position: int = 0) -> int:
        """Empty the slots of `branch` from `position` on; return how many there were."""
        mine = self.owners == branch
        if position:
            mine &= self._positions[: self.length] >= position
        its = np.flatnonzero(mine)
        if len(its):
            self.owners[its] = EMPTY
            self._changed(int(its[0]), int(its[-1]) + 1)
        return len(its)

    def trim(self, least: int) -> int:
        """Drop empty slots at the end, down to a length of `least`; return how many."""
        used = np.flatnonzero(self._bim[least : self.length] != EMPTY)
        length = least + (int(used[-1]) + 1 if len(used) else 0)
        trimmed, self.length = self.length - length, length
        return trimmed

    def pad(self, length: int) -> None:
        """Append empty slots, up to `length`."""
        self._bim[self.length : length] = EMPTY
        self._changed(self.length, max(self.length, length))
        self.length = max(self.length, length)

    def compact(self) -> int:
        """Remove empty slots, as their KV has just been overwritten by compaction; return how many."""
        alive = np.flatnonzero(self.owners != EMPTY)
        self._bim[: len(alive)] = self._bim[alive]
        self._positions[: len(alive)] = self._positions[alive]
        self._changed(0, len(alive))
        gained = self.length - len(alive)
        self.length = len(alive)
        return gained

    def shift(self, first: int, to: int, count: int) -> None:
        """Move the last `count` slots, from `first` on, to `to`, which lies before them; their KV has been moved."""
        for column in (self._bim, self._positions):
            column[to : to + count] = column[first : first + count]
        self._changed(to, to + count)
        self.length = to + count

    def claim(self, count: int, branch: int, position: int) -> None:
        """Append `count` slots of a chain of `branch`, the first at `position`, that no step has filled."""
        start, stop = self.length, self.length + count
        self._bim[start:stop] = branch
        self._positions[start:stop] = np.arange(position, position + count)
        self._changed(start, stop)
        self.length = stop

    def continue_chain(self, count: int) -> None:
        """Append `count` slots that continue the last one, a position each."""
        if not count:
            return
        start, stop = self.length, self.length + count
        self._bim[start:stop] = self._bim[start - 1]
        self._positions[start:stop] = np.arange(1, count + 1) + self._positions[start - 1]
        self._changed(start, stop)
        self.length = stop

    def truncate(self, length: int) -> None:
        """Drop slots from `length` on."""
        self.length = min(self.length, length)
