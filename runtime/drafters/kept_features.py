"""Features that outlive the pass that gave them: rows of the target's features buffer that no step writes.

A head whose draft is not wanted in a round keeps the features of what was committed, which costs a copy, and consumes
all of them at once when it is asked again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.runtime.execution.buffers import Buffers

Rows = NDArray[np.int64]


class KeptFeatures:
    """Rows `[first, first + count)` of the target's features, shared by the heads of an engine."""

    def __init__(self, buffers: Buffers, first: int, count: int) -> None:
        self._buffers, self._first, self._count = buffers, first, count
        self._free = list(range(first + count - 1, first - 1, -1))

    def keep(self, rows: Rows) -> Rows | None:
        """Copy those of the `rows` that the next pass overwrites; return where all of them are then, None without room
        for them."""
        lost = np.flatnonzero(rows < self._first)
        if len(lost) > len(self._free):
            return None
        found = rows.copy()
        found[lost] = [self._free.pop() for _ in range(len(lost))]
        start = 0
        for stop in range(1, len(lost) + 1):  # runs that lie together in both places go in one copy
            ends = stop == len(lost)
            if ends or rows[lost[stop]] != rows[lost[stop - 1]] + 1 or found[lost[stop]] != found[lost[stop - 1]] + 1:
                run = lost[start:stop]
                feature = names.TARGET, names.FEATURES
                self._buffers.copy_rows((*feature, int(rows[run[0]])), (*feature, int(found[run[0]])), len(run))
                start = stop
        return found

    def lasting(self, rows: Rows) -> int:
        """How many of the first rows outlive the next pass."""
        lost = np.flatnonzero(rows < self._first)
        return int(lost[0]) if len(lost) else len(rows)

    def release(self, rows: Rows) -> None:
        """Those of the rows that were kept can be used again."""
        mine = rows[(rows >= self._first) & (rows < self._first + self._count)]
        if len(mine):
            self._free = sorted({*self._free, *mine.tolist()}, reverse=True)  # the lowest is next: runs lie together
