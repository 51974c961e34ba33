"""Recurrent states: what layers without attention keep of each sequence, as those with attention keep KV.

A state cannot be cut: it is of all tokens up to some position, its base. So it advances late. A pass folds what it
feeds of a sequence into the state, but for the last token, and logs the inputs of that one and of the draft after it;
the next pass replays the records that were accepted. Until then any part of them can be dropped. A sequence that goes
further back continues from a snapshot: of its own last chunks, or of the prefix that all share.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import Geometry
from outrider.plans.step_buffers import state_shapes
from outrider.runtime.execution.buffers import Buffers

EVERY = 512  # tokens: a sequence keeps the newest snapshot of each stretch of this length
_MOST = 16  # snapshots of a sequence; of more, every second one goes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """States of `base` tokens, and records of some tokens after them, both of all layers: `parts` `[layers, ...]`,
    `records` `[layers, n, ...]`."""

    base: int
    parts: tuple[NDArray[np.float32], ...]
    records: tuple[NDArray[np.float32], ...]

    @property
    def end(self) -> int:
        """The position up to which nothing has to be computed again."""
        return self.base + int(self.records[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (*self.parts, *self.records))

    def cut(self, end: int) -> Snapshot:
        """Without records of tokens from position `end` on."""
        if end >= self.end:
            return self
        return Snapshot(self.base, self.parts, tuple(each[:, : end - self.base].copy() for each in self.records))


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shapes, in numbers of float32, of one kind of state of a sequence, `part`, and of a record of it, both of all
    layers; a state has at most `most` records."""

    part: tuple[int, ...]
    record: tuple[int, ...]
    most: int

    def snapshot_shapes(self, records: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a part and of its records in a `Snapshot`."""
        return self.part, (self.record[0], records, *self.record[1:])


class StateCache:
    """The states of the target's layers. A sequence is known by its number."""

    def __init__(self, buffers: Buffers, geometry: Geometry) -> None:
        target = names.TARGET
        kinds = [pair for pair in names.STATES if pair[0] in state_shapes(geometry)]
        self._parts = [buffers.array(target, part) for part, _ in kinds]  # [layers, branches, ...]
        self._logs = [buffers.array(target, log) for _, log in kinds]  # [layers, branches, log, ...]
        self._replay = buffers.array(target, names.REPLAY)
        self._replays = buffers.array(target, names.REPLAYS)
        self._fold = buffers.array(target, names.FOLD)
        self._base = [0] * geometry.branches  # the position after the tokens that a state is of
        self._fed: dict[int, int] = {}  # by number, its first token in the step that is not committed yet
        self._snapshots: list[list[Snapshot]] = [[] for _ in self._base]  # of each number, by ascending base
        self._stops: dict[int, int] = {}  # by number, a position that is to have a snapshot
        self._prefix = self._nothing

    @property
    def _nothing(self) -> Snapshot:
        """The state before any token."""
        parts = tuple(np.zeros_like(each[:, 0]) for each in self._parts)
        return Snapshot(0, parts, tuple(each[:, 0, :0].copy() for each in self._logs))

    def arrange(self) -> None:
        """Forget everything."""
        self._prefix = self._nothing
        self.rewind()

    def rewind(self) -> None:
        """Forget all but the prefix that sequences share."""
        for number in range(len(self._base)):
            self.open(number)

    def open(self, number: int) -> None:
        """Begin a sequence after the prefix."""
        self._snapshots[number].clear()
        self._stops.pop(number, None)
        self._restore(number, self._prefix)

    def close(self, number: int) -> None:
        """Free what is kept of a sequence that is over."""
        self._snapshots[number].clear()
        self._stops.pop(number, None)

    def stop_at(self, number: int, position: int) -> None:
        """Keep a snapshot at a position that is not computed yet: up to there others begin as the sequence does."""
        if position > self._end(number):
            self._stops[number] = position

    def reach(self, number: int, position: int, count: int) -> int:
        """Return how many of `count` tokens from `position` on a step takes, so that it stops where it is to."""
        stop = self._stops.get(number, -1)
        return stop + 1 - position if position <= stop < position + count else count

    # A step.

    def feed(self, number: int, first: int, position: int, count: int) -> None:
        """A step feeds a sequence `count` tokens from `position` on; the first is its token `first`."""
        assert position == self._end(number), "tokens that a state lacks, or has twice"
        self._fold[number] = count - 1
        self._base[number] = position + count - 1
        self._fed[number] = first

    def commit(self, kept: NDArray[np.int64] | None) -> None:
        """Accept the records of the step's tokens in `kept`, ascending; None: of all, a chain of each sequence."""
        fed = sorted(self._fed.items(), key=lambda each: each[1])
        self._fed.clear()
        for (number, first), (_, after) in pairwise([*fed, (-1, np.iinfo(np.int64).max)]):
            root = first + int(self._fold[number])
            if kept is None:
                accepted = np.zeros(1, np.int64)
            else:
                low, high = np.searchsorted(kept, (root, after))
                accepted = kept[low:high] - root
            self._replays[number] = len(accepted)
            self._replay[number, : len(accepted)] = accepted
            self._keep_some(number)

    def _keep_some(self, number: int) -> None:
        """Keep a snapshot after a chunk, and in each new stretch: of a stretch the newest, and that of the sequence's
        stop."""
        kept, base = self._snapshots[number], self._base[number]
        stretch = kept[-1].base // EVERY if kept else -1
        if not self._fold[number] and base // EVERY == stretch:
            return
        if stretch == base // EVERY and kept[-1].base != self._stops.get(number):
            kept.pop()
        kept.append(self.snapshot(number))
        if len(kept) > _MOST:
            del kept[1:-1:2]

    def commit_prefix(self) -> None:
        """Commit a step of tokens of the prefix, which number 0 was fed."""
        self.commit(None)
        self._prefix = self.snapshot(0)

    def truncate(self, number: int, end: int) -> int:
        """Go back to position `end`; return the one that was reached, which may be less."""
        kept = self._snapshots[number]
        del kept[bisect_right(kept, end, key=lambda each: each.base) :]
        if kept:  # other tokens may follow
            kept[-1] = kept[-1].cut(end)
        if number not in self._fed and end >= self._base[number]:
            self._replays[number] = min(int(self._replays[number]), end - self._base[number])
            return self._end(number)
        self._restore(number, (kept[-1] if kept else self._prefix).cut(end))  # of a failed step nothing is known
        return self._end(number)

    def _end(self, number: int) -> int:
        return self._base[number] + int(self._replays[number])

    # Copies.

    def snapshot(self, number: int) -> Snapshot:
        """Copy a sequence's state and the records that were accepted after it."""
        accepted = self._replay[number, : int(self._replays[number])]
        parts = tuple(each[:, number].copy() for each in self._parts)
        return Snapshot(self._base[number], parts, tuple(each[:, number, accepted] for each in self._logs))

    def snapshots(self, number: int) -> list[Snapshot]:
        """The sequence's own snapshots, and one of its state as it is, unless a step has failed; by ascending base."""
        now = [] if number in self._fed else [self.snapshot(number)]
        return [*self._snapshots[number], *now]

    def restore(self, number: int, snapshot: Snapshot) -> None:
        """Continue a sequence after a snapshot, whose tokens are its own."""
        self._snapshots[number] = [snapshot]
        self._restore(number, snapshot)

    def restore_prefix(self, snapshot: Snapshot) -> None:
        """Continue the prefix after a snapshot."""
        self._prefix = snapshot
        self._restore(0, snapshot)

    @property
    def prefix(self) -> Snapshot:
        return self._prefix

    def _restore(self, number: int, snapshot: Snapshot) -> None:
        count = snapshot.records[0].shape[1]
        for whole, part in zip(self._parts, snapshot.parts, strict=True):
            whole[:, number] = part
        for log, records in zip(self._logs, snapshot.records, strict=True):
            log[:, number, :count] = records
        self._replay[number, :count] = np.arange(count)
        self._replays[number], self._base[number] = count, snapshot.base
        self._fed.pop(number, None)
