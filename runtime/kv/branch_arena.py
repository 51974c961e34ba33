"""One model's arena under branches: whose each slot is, in one sequence or in a row for every branch.

In one sequence, rows of all branches lie interleaved as they came, behind the one prefix; those of a branch that is
over are dead, and live ones are moved over them when room runs short or most are dead. In batching, every branch has a
row of the arena to itself, which begins with a copy of the prefix. Nothing but this file asks which it is.

Rows are ragged. For engines that need a rectangle they can be padded: each row's new tokens on the left, to the longest
of the step, and its slots to those of the longest row. Padding belongs to nobody, so that nobody sees it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plans import names
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import NOBODY, Step
from runtime.kv.alignment import Alignment, AlignmentState
from runtime.kv.arena_rows import ArenaRows
from runtime.kv.slots import EMPTY, SHARED, SlotTable

# Dead slots are worth a compaction where there are so many, and as many as live ones of branches: what is moved is then
# never more than what was appended since.
_MANY_DEAD = 64


class BranchArena:
    """The slot tables of a model's arena, `rows` of them: one, or one for each branch. A branch has a number.

    A step: `begin`, `append` for what each branch adds, rows in ascending order (`row_of`), the pass, `commit`.
    """

    def __init__(
        self, model: str, buffers: Buffers, step: Step, compact: Program, rows: int, *, padded: bool = False
    ) -> None:
        self._model, self._buffers, self._step, self._compact = model, buffers, step, compact
        self._pooled = rows == 1
        self._maps = [SlotTable(model, buffers, step, row) for row in range(rows)]
        self._source = buffers.of(model, names.KEPT_ROWS)
        self._source_count = buffers.of(model, names.KEPT_COUNT)
        self._move_to = buffers.of(model, names.MOVE_TO)
        kv = buffers.of(model, names.KV)
        self.slot_bytes = kv[:, 0, :, 0].nbytes
        self._prefix = 0
        self._used = 1  # rows that the step has
        self.alignment = AlignmentState(rows) if padded else None
        self._aligned: Alignment | None = None  # of the step
        self._dead = 0  # slots of branches that are over, in the one row of all
        self.bytes_copied = 0
        self.peak_slots = 0
        self.compactions = 0

    def reset(self) -> None:
        """Forget everything."""
        for slots in self._maps:
            slots.truncate(0)
        self._prefix = 0
        self._begin_counts()
        if self.alignment is not None:
            self.alignment.reset()

    def rewind(self) -> None:
        """Forget all but the prefix, which every row that has had a copy keeps."""
        for slots in self._maps:
            slots.truncate(self._prefix)
        self._begin_counts()
        self._note_peak()

    def _begin_counts(self) -> None:
        self._dead = self.bytes_copied = self.peak_slots = self.compactions = 0

    @property
    def length(self) -> int:
        """Slots that the fullest row has committed."""
        return max(slots.length for slots in self._maps)

    def row_of(self, branch: int) -> int:
        return 0 if self._pooled else branch

    def holds(self, ends: Sequence[int], chunk: int) -> bool:
        """Whether there is room for branches of these lengths at once, each feeding at most `chunk` tokens a step."""
        room = self._step.largest_view - self._prefix
        if self.alignment is not None:  # a row is padded to what another feeds
            room -= chunk
        return sum(ends) <= room if self._pooled else max(ends) <= room

    def width(self, branches: Collection[int]) -> int:
        """Most tokens that each row may add in a step of these branches: a rectangle of them is all that a step has."""
        if self.alignment is None or not branches:
            return self._step.most
        return self._step.most // (1 + max(map(self.row_of, branches)))

    def fit(self, chains: Mapping[int, int], nodes: Mapping[int, int]) -> dict[int, int]:
        """How many of the nodes drafted for each branch there is room for, behind chains of all branches."""
        view = self._step.largest_view
        if self._pooled:
            left = view - self._maps[0].length - sum(chains.values())
            fitting = {}
            for branch, count in nodes.items():
                fitting[branch] = max(0, min(count, left))
                left -= fitting[branch]
            return fitting
        longest = self.length if self.alignment is not None else 0
        width = self.width(chains)
        return {
            branch: max(0, min(count, view - max(longest, self._maps[branch].length) - chain, width - chain))
            for branch, count in nodes.items()
            for chain in (chains[branch],)
        }

    def begin(self, tokens: Mapping[int, int]) -> None:
        """An empty step behind all rows, for so many tokens of each of these branches; none: for the prefix."""
        self._used = 1 + max(map(self.row_of, tokens), default=0)
        used = self._maps[: self._used]
        self._aligned = None
        if self.alignment is not None and tokens:
            self.alignment.cache_length = max(slots.length for slots in used)
            for slots in used:
                slots.pad(self.alignment.cache_length)
            self._aligned = self.alignment.align([tokens.get(row, 0) for row in range(self._used)])
        self._step.begin_branches([slots.length for slots in used])
        self._pad_rows(0)

    def append(self, tokens: Sequence[int], position: int, branch: int) -> int:
        """Lay out the next tokens of a branch; the index of the last one in the step."""
        return self._step.append_chain(tokens, position, branch, self.row_of(branch))

    def close_row(self, branch: int) -> None:
        """The step has all of a branch's tokens."""
        if self._aligned is not None:
            self._pad_rows(self.row_of(branch) + 1)

    def _pad_rows(self, first: int) -> None:
        """Lay out the padding of row `first`, and of those behind it that have nothing else."""
        if self._aligned is None:
            return
        for row in range(first, self._used):
            self._step.append_padding(int(self._aligned.padding_lengths[row]), row)
            if self._aligned.valid_lengths[row]:
                break

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
        if self.alignment is not None:
            self.alignment.open(self.row_of(branch), self._prefix)

    def restore_prefix(self, rows: int, lead: int = 0) -> ArenaRows:
        """The prefix begins with so many rows that no step has made: of tokens from `lead` on, in what is returned."""
        self._maps[0].restore(rows, SHARED, 0)
        self._prefix = self._maps[0].length
        self._note_peak()
        return self.prefix_rows(lead)

    def prefix_rows(self, lead: int = 0) -> ArenaRows:
        """The prefix's rows by its tokens, of which the first `lead` have none."""
        return ArenaRows(self._buffers.of(self._model, names.KV)[:, 0], lead)

    def restore(self, branch: int, rows: int) -> None:
        """A branch that has no rows yet takes so many, of its first tokens, that no step has made; see `rows_of`."""
        self.make_room(rows)
        self._maps[self.row_of(branch)].restore(rows, branch, self._prefix)
        self._note_peak()

    def rows_of(self, branch: int, lead: int = 0) -> ArenaRows:
        """The branch's own rows by its tokens, of which the first `lead` have none."""
        kv = self._buffers.of(self._model, names.KV)
        if self._pooled:
            return ArenaRows(kv[:, 0], lead, np.flatnonzero(self._maps[0].owners == branch))
        return ArenaRows(kv[:, branch, :, self._prefix :], lead)

    @property
    def stays(self) -> bool:
        """Whether a branch's rows stay where they are when it is over, until another has its number."""
        return not self._pooled

    def commit(self, kept: NDArray[np.int64] | None = None) -> None:
        """Take the step's tokens, or those that `kept` lists, which have been moved together in their rows."""
        step = self._step
        if kept is None:
            kept = np.arange(step.new_tokens)
        cuts = np.searchsorted(kept, step.row_splits[: self._used + 1])
        for row in range(self._used):
            mine = kept[cuts[row] : cuts[row + 1]]
            if len(mine):
                self._maps[row].commit(len(mine), mine)
                moved = mine != np.arange(step.row_splits[row], step.row_splits[row] + len(mine))
                self.bytes_copied += int(moved.sum()) * self.slot_bytes
        if self.alignment is not None and self._aligned is not None:
            own = np.searchsorted(kept[step.branch[kept] != NOBODY], step.row_splits[: self._used + 1])
            self.alignment.commit(self._aligned, np.diff(own).tolist())
            for slots in self._maps[: self._used]:
                slots.release(NOBODY)
        self._note_peak()

    def close(self, branch: int) -> None:
        """The branch is over: nobody sees its slots."""
        if self._pooled:
            self._dead += self._maps[0].release(branch)
        else:
            self._maps[branch].truncate(self._prefix)
            if self.alignment is not None:
                self.alignment.open(branch, self._prefix)

    def make_room(self, most: int) -> None:
        """Move live rows over dead ones where a step of `most` slots might not fit behind them, or many are dead."""
        step = self._step
        sparse = self._dead >= max(_MANY_DEAD, (self._maps[0].length - self._prefix) / 2)
        for row, slots in enumerate(self._maps):
            if slots.length + most <= step.largest_view and not (self._pooled and sparse):
                continue
            for to, rows in _moves(slots, len(self._source)):
                start = int(rows[0])
                step.begin_moves(start, int(rows[-1]) + 1 - start, row)
                self._source[: len(rows)] = rows - start
                self._source_count[0], self._move_to[row] = len(rows), to
                self._compact.run()
                self.bytes_copied += len(rows) * self.slot_bytes
            self.compactions += slots.compact() > 0
            self._dead = 0

    def _note_peak(self) -> None:
        self.peak_slots = max(self.peak_slots, sum(slots.length for slots in self._maps))


def _moves(slots: SlotTable, reach: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Live rows behind dead slots, ascending, in parts that lie within `reach` slots, and where each part goes."""
    alive = np.flatnonzero(slots.owners != EMPTY)
    to = int(np.argmax(alive != np.arange(len(alive)))) if len(alive) and alive[-1] >= len(alive) else len(alive)
    while to < len(alive):
        count = int(np.searchsorted(alive, alive[to] + reach)) - to
        yield to, alive[to : to + count]
        to += count
