"""The slot map of one model's arena: which branch and position each committed row belongs to."""

from __future__ import annotations

import numpy as np

from runtime.step import Step

PREFIX, EMPTY = -1, -2


class SlotMap:
    """Rows [0, length) are committed; slots behind them hold garbage that nothing reads.

    Owner of `length`; writes `bim` of the step's buffers and its own `positions` (int64 `[capacity]`).
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.length = 0
        self.positions = np.zeros(len(step.bim), np.int64)

    def next_position(self) -> int:
        """Position of the first token behind the committed rows."""
        return int(self.positions[self.length - 1]) + 1 if self.length else 0

    def commit(self, rows: int, compacted: bool) -> None:
        """Take the step's first `rows` rows, after KvGather has moved the kept ones there if `compacted`."""
        step, start, stop = self._step, self.length, self.length + rows
        if rows == 1:  # the first new token of a step is never moved
            step.bim[start] = step.branch[0]
            self.positions[start] = step.positions[0]
        elif compacted:
            kept = step.kept_rows[:rows]
            np.take(step.branch, kept, out=step.bim[start:stop], mode="clip")
            np.take(step.positions, kept, out=self.positions[start:stop], mode="clip")
        else:
            step.bim[start:stop] = step.branch[:rows]
            self.positions[start:stop] = step.positions[:rows]
        self.length = stop

    def truncate(self, length: int) -> None:
        """Forget rows from `length` on."""
        self.length = min(self.length, length)
