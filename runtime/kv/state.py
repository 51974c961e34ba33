"""States that recur: what layers without attention keep of each sequence, beside the KV of those that attend.

A state cannot be cut: it is of all tokens up to some position, its base. So it goes on late. A pass folds what it feeds
of a sequence into the state, but for the last token, and logs the inputs of that one and of the draft after it; the next
pass replays the records that were accepted. Until then any part of them can be dropped. A sequence that goes further
back starts over from the prefix that all share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import Geometry
from outrider.runtime.execution.buffers import Buffers


class StateCache:
    """The states of the target's convolutions. A sequence is known by its number."""

    def __init__(self, buffers: Buffers, geometry: Geometry) -> None:
        self._tail, self._log = (buffers.array(names.TARGET, name) for name in (names.CONV_TAIL, names.CONV_LOG))
        self._replay = buffers.array(names.TARGET, names.REPLAY)
        self._replays = buffers.array(names.TARGET, names.REPLAYS)
        self._fold = buffers.array(names.TARGET, names.FOLD)
        self._base = [0] * geometry.branches  # the position after the tokens that a state is of
        self._fed: dict[int, int] = {}  # by number, the first token in the step that is not committed yet
        self._clear_prefix()

    def arrange(self) -> None:
        """Forget everything."""
        self._clear_prefix()
        self.rewind()

    def rewind(self) -> None:
        """Forget all but the prefix that sequences share."""
        self._fed.clear()
        for number in range(len(self._base)):
            self.open(number)

    def _clear_prefix(self) -> None:
        self._prefix, self._prefix_tail = 0, np.zeros_like(self._tail[:, 0])

    def open(self, number: int) -> None:
        """Begin a sequence after the prefix."""
        self._tail[:, number] = self._prefix_tail
        self._replays[number] = 0
        self._base[number] = self._prefix
        self._fed.pop(number, None)

    def feed(self, number: int, first: int, position: int, count: int) -> None:
        """A step feeds a sequence `count` tokens from `position` on; the first is its token `first`."""
        assert position == self._end(number), "tokens that a state lacks, or has twice"
        self._fold[number] = count - 1
        self._base[number] = position + count - 1
        self._fed[number] = first

    def commit(self, kept: NDArray[np.int64] | None) -> None:
        """Accept the records of the step's tokens in `kept`, ascending; None: of all, a chain of each sequence."""
        starts = sorted(self._fed.values())
        for number, first in self._fed.items():
            if kept is None:
                accepted = np.zeros(1, np.int64)
            else:
                after = next((start for start in starts if start > first), None)
                low, high = np.searchsorted(kept, (first + self._fold[number], after or np.iinfo(np.int64).max))
                accepted = kept[low:high] - first - self._fold[number]
            self._replays[number] = len(accepted)
            self._replay[number, : len(accepted)] = accepted
        self._fed.clear()

    def commit_prefix(self) -> None:
        """Commit a step of tokens of the prefix, which number 0 was fed."""
        self.commit(None)
        records = self._log[:, 0, self._replay[0, : int(self._replays[0])]]
        rows = np.concatenate((self._tail[:, 0], records), axis=1)
        self._prefix, self._prefix_tail = self._end(0), rows[:, -self._tail.shape[2] :]

    def truncate(self, number: int, end: int) -> int:
        """Go back to position `end`; return the one that was reached, which may be less."""
        if number in self._fed or end < self._base[number]:  # of a step that has failed nothing is known
            self.open(number)
            return min(end, self._prefix)
        self._replays[number] = min(int(self._replays[number]), end - self._base[number])
        return end

    def _end(self, number: int) -> int:
        return self._base[number] + int(self._replays[number])
