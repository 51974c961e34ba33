"""One model's arena under branches: whose each slot is, in one sequence or in a row for every branch.

In one sequence, rows of all branches lie interleaved as they came, behind the one prefix; those of a branch that is
over are dead, and live ones are moved over them when room runs short. In batching, every branch has a row of the arena
to itself, which begins with a copy of the prefix. Nothing but this file asks which it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Geometry
from runtime.arena import EMPTY, SHARED, SlotMap
from runtime.buffers import Buffers
from runtime.program import Program
from runtime.step import Step


@dataclass(frozen=True)
class Kept:
    """What a pass has left of a step: the kept tokens by row, and the slot of each row's first one."""

    by_row: list[NDArray[np.int64]]
    first: list[int]


class BranchArena:
    """The slot maps of a model's arena, `rows` of them: one, or one for each branch. A branch has a number.

    A step: `begin`, `append` for what each branch adds, rows in ascending order (`row_of`), the pass, `commit`.
    """

    def __init__(
        self, model: str, geometry: Geometry, buffers: Buffers, step: Step, compact: Program, rows: int
    ) -> None:
        self._model, self._buffers, self._step, self._compact = model, buffers, step, compact
        self._pooled = rows == 1
        self._maps = [SlotMap(model, buffers, step, row) for row in range(rows)]
        self._source = buffers.of(model, names.KEPT_ROWS)
        self._source_count = buffers.of(model, names.KEPT_COUNT)
        self._move_to = buffers.of(model, names.MOVE_TO)
        kv = buffers.of(model, names.KV)
        self.slot_bytes = kv[:, 0, :, 0].nbytes
        self._prefix = 0
        self._used = 1  # rows that the step has
        self.dead = 0
        self.bytes_copied = 0
        self.peak_slots = 0

    def reset(self) -> None:
        """Forget everything."""
        for slots in self._maps:
            slots.truncate(0)
        self._prefix, self.dead, self.bytes_copied, self.peak_slots = 0, 0, 0, 0

    @property
    def length(self) -> int:
        """Slots that the fullest row has committed."""
        return max(slots.length for slots in self._maps)

    def row_of(self, branch: int) -> int:
        return 0 if self._pooled else branch

    def holds(self, ends: Sequence[int]) -> bool:
        """Whether there is room for branches of these lengths at once."""
        room = self._step.largest_view - self._prefix
        return sum(ends) <= room if self._pooled else max(ends) <= room

    def begin(self, branches: Sequence[int]) -> None:
        """An empty step behind all rows, for these branches; none: for the prefix."""
        self._used = 1 + max(map(self.row_of, branches), default=0)
        self._step.begin_branches([slots.length for slots in self._maps[: self._used]])

    def append(self, tokens: Sequence[int], position: int, branch: int) -> int:
        """Lay out the next tokens of a branch; the index of the last one in the step."""
        return self._step.append_chain(tokens, position, branch, self.row_of(branch))

    def room_behind(self, branch: int) -> int:
        """Slots that are left in the branch's row behind what has been laid out."""
        row, step = self.row_of(branch), self._step
        return step.largest_view - self._maps[row].length - int(step.row_splits[row + 1] - step.row_splits[row])

    def commit_prefix(self, rows: int) -> None:
        """The step's `rows` tokens were the next ones of the prefix."""
        self._maps[0].commit(rows, kept=None, owner=SHARED)
        self._prefix = self._maps[0].length
        self._note_peak()

    def open(self, branch: int) -> None:
        """A branch begins: its row has the prefix from now on."""
        slots = self._maps[self.row_of(branch)]
        if slots.length < self._prefix:
            self._buffers.copy_slots(self._model, 0, self.row_of(branch), self._prefix)
            slots.copy(self._maps[0], self._prefix)
            self.bytes_copied += self._prefix * self.slot_bytes

    def commit(self, kept: NDArray[np.int64] | None = None) -> Kept:
        """Take the step's tokens, or those that `kept` lists, which have been moved together in their rows."""
        step = self._step
        if kept is None:
            kept = np.arange(step.new_tokens)
        cuts = np.searchsorted(kept, step.row_splits[: self._used + 1])
        by_row, first = [], []
        for row in range(self._used):
            mine = kept[cuts[row] : cuts[row + 1]]
            first.append(self._maps[row].length)
            by_row.append(mine)
            if len(mine):
                self._maps[row].commit(len(mine), mine)
                moved = mine != np.arange(step.row_splits[row], step.row_splits[row] + len(mine))
                self.bytes_copied += int(moved.sum()) * self.slot_bytes
        self._note_peak()
        return Kept(by_row, first)

    def drop(self, kept: Kept, branch: int, rows: int) -> None:
        """Of what `commit` has just taken of a branch, keep the first `rows`."""
        row = self.row_of(branch)
        if not self._pooled:
            self._maps[row].truncate(kept.first[row] + rows)
            return
        mine = np.flatnonzero(self._step.branch[kept.by_row[row]] == branch)
        if rows < len(mine):
            self.dead += self._maps[row].drop(kept.first[row] + mine[rows:])

    def close(self, branch: int) -> None:
        """The branch is over: nobody sees its slots."""
        if self._pooled:
            self.dead += self._maps[0].release(branch)
        else:
            self._maps[branch].truncate(self._prefix)

    def make_room(self, most: int) -> None:
        """Move live rows over dead ones where a step of `most` slots might not fit behind them."""
        slots, step = self._maps[0], self._step
        if not self.dead or slots.length + most <= step.largest_view:
            return
        for to, rows in _moves(slots, len(self._source)):
            start = int(rows[0])
            step.begin_moves(start, int(rows[-1]) + 1 - start)
            self._source[: len(rows)] = rows - start
            self._source_count[0], self._move_to[0] = len(rows), to
            self._compact.run()
            self.bytes_copied += len(rows) * self.slot_bytes
        slots.compact()
        self.dead = 0

    def _note_peak(self) -> None:
        self.peak_slots = max(self.peak_slots, sum(slots.length for slots in self._maps))


def _moves(slots: SlotMap, reach: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Live rows behind dead slots, ascending, in parts that lie within `reach` slots, and where each part goes."""
    alive = np.flatnonzero(slots.owners != EMPTY)
    to = int(np.argmax(alive != np.arange(len(alive)))) if len(alive) and alive[-1] >= len(alive) else len(alive)
    while to < len(alive):
        count = int(np.searchsorted(alive, alive[to] + reach)) - to
        yield to, alive[to : to + count]
        to += count
