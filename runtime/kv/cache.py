"""The KV cache of one model: which slot holds the KV of which token of which sequence.

Sequences share one row of the cache, or have a row each (`arrange`); nothing but this file asks which it is. In one
row, slots of all sequences lie interleaved as they came, after the prefix that all share. Slots of a sequence that is
over are dead, and live ones are moved over them when room runs short or most are dead. With a row each, every row
begins with a copy of the prefix.

Rows are ragged. For engines that need a rectangle they can be padded: each row's new tokens on the left, to the longest
of the step, and its slots to those of the longest row. Padding belongs to no sequence, so that none sees it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.kv_slots import are_finite
from outrider.plans.manifest import BatchSize, Geometry
from outrider.plans.sampling import NOBODY
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import Step
from outrider.runtime.kv.alignment import Alignment, AlignmentState
from outrider.runtime.kv.memory import HostKv
from outrider.runtime.kv.slots import EMPTY, SHARED, SlotTable
from outrider.runtime.kv.state import StateCache
from outrider.runtime.kv.token_kv import TokenKv
from outrider.runtime.kv.window import WindowedRow

_LOG = logging.getLogger("outrider")
# Dead slots are worth a compaction from this number on, where they are no fewer than live ones of sequences: what is
# moved is then never more than what was appended since. Of a sequence that is alone they are worth one at once: only
# what was appended since others came is moved.
_MANY_DEAD = 64
_PIECE = 256  # slots that are looked through at once


class KvCache:
    """Slot tables of a model's KV cache, one for each of its rows. A sequence is known by its number.

    A step: `begin`, `append` for what each sequence adds, rows in ascending order (`row_of`), the pass, `commit`. For
    one sequence in row 0, `begin_alone` does without the bookkeeping of rows.

    `window` stands for the rows of a drafter whose cache keeps the beginning and the end of its one sequence alone.
    """

    def __init__(
        self,
        model: str,
        buffers: Buffers,
        step: Step,
        geometry: Geometry,
        compact: Program | None = None,
        *,
        lead: int = 0,
        padded: bool = False,
        rectangular: bool = False,
    ) -> None:
        """`compact` moves slots; None where one sequence is all. The first `lead` tokens of a sequence have no KV.

        A `rectangular` engine takes as many slots of each row as of the longest, though rows are ragged.
        """
        self._model, self._buffers, self._step, self._compact, self._lead = model, buffers, step, compact, lead
        self._kv = buffers.kv(model)
        self._tables = [SlotTable(model, buffers, step, row) for row in range(len(self._kv))]
        self.window: WindowedRow | None = None
        if geometry.window:
            self.window = WindowedRow(self._kv[0], geometry, self._tables[0], lead)
        self.states = None if geometry.states is None else StateCache(buffers, geometry)
        self.slot_bytes = self._kv[0].slot_bytes
        self._padded, self._rectangular = padded, rectangular
        self.alignment: AlignmentState | None = None
        self._aligned: Alignment | None = None  # of the step
        self.batch: BatchSize | None = None
        """The recorded size that the step is filled up to."""
        self._filling: list[int] = []  # by row, how many tokens fill it up, which come last
        self._adding: Collection[int] = ()  # sequences of a step that is filled up
        self.filled_rows: set[int] = set()
        """Numbers whose rows tokens that fill up a step were written to, over KV that no sequence has any more."""
        self._open: set[int] = set()
        self.arrange(pooled=True)

    # Between runs.

    def arrange(self, *, pooled: bool) -> None:
        """Forget everything; sequences share one row from now on, or have a row each."""
        self._pooled = pooled
        self._rows = self._tables[:1] if pooled else self._tables
        self.alignment = AlignmentState(len(self._rows)) if self._padded else None
        self._prefix = 0
        self._used = 1  # rows that the step has
        self._open.clear()
        for table in self._tables:
            table.truncate(0)
        if self.states is not None:
            self.states.arrange()
        if self.window is not None:
            self.window.truncate(0)
        self._begin_counts()

    def rewind(self) -> None:
        """Forget all but the prefix, which every row that has had a copy keeps."""
        self._open.clear()
        for table in self._rows:
            table.truncate(self._prefix)
        if self.states is not None:
            self.states.rewind()
        self._begin_counts()
        self._note_peak()

    def _begin_counts(self) -> None:
        self._dead = 0  # slots of sequences that are over, in the one row of all
        self.peak_slots = self.compactions = 0
        self.operations: Counter[str] = Counter()  # slots, by what was done to them (`Stats.kv_operations`)

    def _note(self, operation: str, row: int, slots: int) -> None:
        if slots:
            self.operations[operation] += slots
            _LOG.debug("KV of %s, row %d: %s, %d slots", self._model, row, operation, slots)

    # Room.

    @property
    def tables(self) -> Sequence[SlotTable]:
        """Slots of all rows."""
        return self._tables

    @property
    def bytes_copied(self) -> int:
        """Bytes of slots that were copied or moved."""
        return self.slot_bytes * sum(self.operations[each] for each in self.operations if each != "cut_off")

    @property
    def pooled(self) -> bool:
        """Whether sequences share one row."""
        return self._pooled

    @property
    def sequences(self) -> int:
        """Number of open sequences."""
        return len(self._open)

    @property
    def length(self) -> int:
        """Number of committed slots of the fullest row."""
        return max(table.length for table in self._rows)

    @property
    def live(self) -> int:
        """Number of committed slots that the prefix and open sequences have, of all rows; the others are free."""
        if self._pooled:
            return self._tables[0].length - self._dead
        return sum(self._rows[number].length for number in self._open)

    @property
    def capacity(self) -> int:
        """Number of slots that sequences can have, of all rows."""
        return len(self._rows) * self._step.largest_view

    @property
    def alone(self) -> bool:
        """Whether one sequence has row 0 to itself, and no other row is in use."""
        return len(self._open) == 1 and (self._pooled or 0 in self._open) and self.alignment is None

    @property
    def in_order(self) -> bool:
        """Whether every open sequence has a row to itself, in which slot i holds its i-th token."""
        return not self._pooled or (len(self._open) == 1 and not self._dead)

    def row_of(self, number: int) -> int:
        return 0 if self._pooled else number

    def room(self, number: int) -> int:
        """Number of free slots in the sequence's row."""
        return self._step.largest_view - self._rows[self.row_of(number)].length

    def holds(self, ends: Sequence[int], chunk: int) -> bool:
        """Whether there is room for sequences of `ends` tokens of their own, of which a step feeds at most `chunk`."""
        room = self._step.largest_view - self._prefix
        if self.alignment is not None:  # a row is padded to what another feeds
            room -= chunk
        return sum(ends) <= room if self._pooled else max(ends) <= room

    def _fill(self, tokens: Mapping[int, int]) -> None:
        """Choose the recorded size of a step that adds `tokens` by sequence, and what each row has of the tokens that
        fill it up. None is recorded for padded rows and the partial cache, and near the end of the view.

        Rows of sequences come first: KV of earlier sequences may lie in others, for the prefix cache.
        """
        step, total, pooled = self._step, sum(tokens.values()), self._pooled
        sequences = len(tokens) if pooled else 1 + max(tokens)
        size = step.batch_size(sequences, total, max(tokens.values()))
        if size is None or self.alignment is not None or self._model == names.PARTIAL:
            return
        rows = self._rows[: size.sequences]
        if self._rectangular and not pooled and size.each + max(table.length for table in rows) > self._kv[0].slots:
            return
        own = [total] if pooled else [tokens.get(row, 0) for row in range(len(rows))]
        each, view, left = size.tokens if pooled else size.each, step.largest_view - step.reach, size.tokens - total
        filling = len(rows) * [0]
        for row in sorted(range(len(rows)), key=lambda row: own[row] == 0):
            filling[row] = max(0, min(left, each - own[row], view - rows[row].length - own[row]))
            left -= filling[row]
        if not left:
            self.batch, self._filling = size, filling

    def width(self, numbers: Collection[int]) -> int:
        """Most tokens that each row may add in a step of these sequences; padded rows are a rectangle within a step.

        Where an engine takes as many slots of each row, all rows have them.
        """
        rows = 1 + max(map(self.row_of, numbers), default=0)
        most = self._step.most
        if self._rectangular and rows > 1:
            most = min(most, self._kv[0].slots - max(table.length for table in self._rows[:rows]))
        return most if self.alignment is None else most // rows

    def fit(self, chains: Mapping[int, int], nodes: Mapping[int, int]) -> dict[int, int]:
        """Number of each sequence's drafted nodes that there is room for, after the chains of all sequences."""
        view = self._step.largest_view
        if self._pooled:
            left = view - self._tables[0].length - sum(chains.values())
            fitting = {}
            for number, count in nodes.items():
                fitting[number] = max(0, min(count, left))
                left -= fitting[number]
            return fitting
        longest = self.length if self.alignment is not None else 0
        width = self.width(chains)
        return {
            number: max(0, min(count, view - max(longest, self._rows[number].length) - chain, width - chain))
            for number, count in nodes.items()
            for chain in (chains[number],)
        }

    def make_room(self, most: int) -> None:
        """Move live slots over dead ones where a step of `most` might not fit after them, or many are dead."""
        step = self._step
        least = 1 if len(self._open) == 1 else max(_MANY_DEAD, (self._tables[0].length - self._prefix) / 2)
        many = self._dead >= least
        for row, table in enumerate(self._rows):
            if table.length + most <= step.largest_view and not (self._pooled and many):
                continue
            if self._compact is None:
                continue
            source, count = (self._buffers.array(self._model, name) for name in (names.KEPT_INDICES, names.KEPT_COUNT))
            for to, slots in _moves(table, len(source)):
                start = int(slots[0])
                step.begin_moves(start, int(slots[-1]) + 1 - start, row)
                source[: len(slots)] = slots - start
                count[0] = len(slots)
                self._buffers.array(self._model, names.MOVE_TO)[row] = to
                self._compact.run()
                self._note("compacted", row, len(slots))
            self.compactions += table.compact() > 0
            self._dead = 0

    # A step.

    def begin(self, tokens: Mapping[int, int], *, fills: bool = False) -> None:
        """Begin an empty step after all rows, for `tokens` by sequence; none: for the prefix.

        With `fills` it is filled up to a recorded size, where there is one, with tokens that nobody sees, and whose KV
        is never committed.
        """
        self._used = 1 + max(map(self.row_of, tokens), default=0)
        self._aligned, self.batch, self._filling = None, None, []
        if fills and any(tokens.values()):
            self._fill(tokens)
        if self._filling:
            self._used = len(self._filling)
            if not self._pooled:
                self.filled_rows.update(row for row, count in enumerate(self._filling) if count and row not in tokens)
        used = self._rows[: self._used]
        if self.alignment is not None and tokens:
            self.alignment.cache_length = max(table.length for table in used)
            for table in used:
                table.pad(self.alignment.cache_length)
            self._aligned = self.alignment.align([tokens.get(row, 0) for row in range(self._used)])
        self._step.begin_rows([table.length for table in used], self._kv[0].slots)
        self._pad_rows(0)
        self._adding = tokens.keys()
        if self._filling and not self._pooled and 0 not in tokens:
            self._fill_rows(0)

    def reach(self, number: int, position: int, count: int) -> int:
        """Return how many of `count` tokens of a sequence from `position` on a step takes."""
        return count if self.states is None else self.states.reach(number, position, count)

    def compact_if_worthwhile(self, most: int) -> None:
        """Make room for a step of `most` slots where there are dead ones."""
        if self._dead:
            self.make_room(most)

    def begin_alone(self, tokens: list[int], position: int, number: int) -> None:
        """Lay out a whole step: the next tokens of a sequence that is alone in row 0."""
        self._used, self._aligned, self.batch, self._filling = 1, None, None, []
        if self.states is not None:
            self.states.feed(number, 0, position, len(tokens))
        self._step.begin(self._tables[0].length, position, tokens, number, self._kv[0].slots)

    def append(self, tokens: Sequence[int], position: int, number: int) -> int:
        """Lay out the next tokens of a sequence; return the index of the last one in the step."""
        last = self._step.append_chain(tokens, position, number, self.row_of(number))
        if self.states is not None:
            self.states.feed(number, last + 1 - len(tokens), position, len(tokens))
        return last

    def close_row(self, number: int) -> None:
        """End the tokens of a sequence in the step."""
        if self._aligned is not None:
            self._pad_rows(self.row_of(number) + 1)
        if self._filling and not self._pooled:
            self._fill_rows(number)

    def close_step(self) -> None:
        """End the step."""
        if self.batch is not None:
            if self._pooled:
                self._fill_rows(0)
            self._step.end_batch(self.batch)

    def _fill_rows(self, first: int) -> None:
        """Fill up row `first`, and those after it up to one that a sequence adds tokens to."""
        for row in range(first, len(self._filling)):
            if row > first and row in self._adding:
                break
            self._step.append_filling(self._filling[row], row)

    def _pad_rows(self, first: int) -> None:
        """Lay out the padding of row `first`, and of those after it that have nothing else."""
        if self._aligned is None:
            return
        for row in range(first, self._used):
            self._step.append_padding(int(self._aligned.padding_lengths[row]), row)
            if self._aligned.valid_lengths[row]:
                break

    def commit(self, kept: NDArray[np.int64] | None = None) -> None:
        """Commit KV of the step's tokens, or of those that `kept` lists, which were moved together in their rows."""
        step = self._step
        if self.states is not None:
            self.states.commit(kept)
        if self._used == 1 and not self._filling and self.alignment is None:  # without the bookkeeping of rows
            self._commit_row(0, step.new_tokens if kept is None else len(kept), kept, 0)
            self._note_peak()
            return
        if kept is None:
            kept = np.arange(step.new_tokens)
            if self._filling:
                kept = kept[step.branch[: step.new_tokens] != NOBODY]
        cuts = np.searchsorted(kept, step.row_splits[: self._used + 1])
        for row in range(self._used):
            mine = kept[cuts[row] : cuts[row + 1]]
            self._commit_row(row, len(mine), mine, int(step.row_splits[row]))
        if self.alignment is not None and self._aligned is not None:
            own = np.searchsorted(kept[step.branch[kept] != NOBODY], step.row_splits[: self._used + 1])
            self.alignment.commit(self._aligned, np.diff(own).tolist())
            for table in self._rows[: self._used]:
                table.release(NOBODY)
        self._note_peak()

    def _commit_row(self, row: int, count: int, kept: NDArray[np.int64] | None, first: int) -> None:
        """Commit `count` tokens of a row whose tokens begin at `first` in the step."""
        if kept is not None and count and int(kept[-1]) >= first + count:
            self._note("accepted", row, int(np.count_nonzero(kept != np.arange(first, first + count))))
        if count:
            self._rows[row].commit(count, kept)

    def continue_chain(self, count: int) -> None:
        """Commit `count` slots after the last one of row 0, which the levels of a draft have filled."""
        self._tables[0].continue_chain(count)

    def _note_peak(self) -> None:
        self.peak_slots = max(self.peak_slots, sum(table.length for table in self._rows))

    # The prefix that all sequences share.

    def commit_prefix(self, count: int) -> None:
        """Commit the step's `count` tokens as the next ones of the prefix."""
        self._tables[0].commit(count, kept=None, owner=SHARED)
        if self.states is not None:
            self.states.commit_prefix()
        self._prefix = self._tables[0].length
        self._note_peak()

    def restore_prefix(self, count: int) -> TokenKv:
        """Claim slots for the beginning of the prefix; return where its KV is to be copied, by tokens."""
        self._tables[0].claim(count, SHARED, 0)
        self._prefix = self._tables[0].length
        self._note_peak()
        return self.prefix_kv()

    def prefix_kv(self) -> TokenKv:
        """KV of the prefix by its tokens."""
        return TokenKv(self._kv[0], self._lead)

    # Sequences.

    def open(self, number: int) -> None:
        """Open a sequence; its row gets a copy of the prefix where it has none."""
        self._open.add(number)
        if self.states is not None:
            self.states.open(number)
        row = self.row_of(number)
        table = self._rows[row]
        if table.length < self._prefix:
            self._kv[row].copy(0, self._kv[0], 0, self._prefix)
            table.copy(self._tables[0], self._prefix)
            self._note("prefix", row, self._prefix)
        if self.alignment is not None:
            self.alignment.open(row, self._prefix)

    def close(self, number: int) -> None:
        """Close a sequence: its slots belong to nobody."""
        self._open.discard(number)
        if self.states is not None:
            self.states.close(number)
        if not self._pooled or not self._open:  # nothing of the row is anybody's but the prefix
            self._rows[self.row_of(number)].truncate(self._prefix)
            if self._pooled:
                self._dead = 0
            if self.window is not None:
                self.window.truncate(0)
            if self.alignment is not None:
                self.alignment.open(self.row_of(number), self._prefix)
        else:
            self._dead += self._tables[0].release(number)

    def truncate(self, number: int, end: int) -> int:
        """Drop the KV of a sequence from position `end` on; return its new end, which may be less: a window has gaps,
        and states do not go back any way."""
        if self.states is not None:
            end = self.states.truncate(number, end)
        if self.window is not None:
            self.window.truncate(end)
            return self.window.end
        row = self.row_of(number)
        table = self._rows[row]
        released = table.release(number, end)
        self._note("cut_off", row, released)
        if self.alignment is not None:
            self.alignment.valid_lengths[row] -= released
        trimmed = table.trim(self._prefix)
        if self._pooled:
            self._dead = max(0, self._dead + released - trimmed)
        return end

    def is_finite(self, number: int) -> bool:
        """Whether the sequence's own KV has no infinity and no NaN."""
        row = self.row_of(number)
        slots = np.flatnonzero(self._rows[row].owners == number)
        if not len(slots):
            return True
        first, last = int(slots[0]), int(slots[-1])
        return are_finite(self._kv[row].array(first, last + 1 - first)[:, :, slots - first])

    def erase(self, number: int) -> None:
        """Zero the free slots of the sequence's row whose KV is not finite."""
        row = self.row_of(number)
        table, kv = self._rows[row], self._kv[row]
        free = np.ones(kv.slots, np.bool_)
        free[: table.length] = table.owners == EMPTY
        for first in range(0, kv.slots, _PIECE):
            slots = np.flatnonzero(free[first : first + _PIECE])
            found = kv.array(first, min(_PIECE, kv.slots - first))
            if not are_finite(found[:, :, slots]):
                zeros = HostKv(np.zeros((*found.shape[:2], len(slots), found.shape[3]), found.dtype))
                TokenKv(kv, slots=first + slots).put(0, len(slots), zeros, 0)

    def claim(self, number: int, first: int, count: int) -> None:
        """Give a sequence `count` slots from position `first` on, whose KV the caller writes (`kv_of`), not a step."""
        if self._compact is not None:
            self.make_room(count)
        self._rows[self.row_of(number)].claim(count, number, first)
        self._note_peak()

    def kv_of(self, number: int) -> TokenKv:
        """KV of a sequence after no prefix, by its tokens."""
        if self._pooled and self._compact is not None:  # slots of others may lie between
            return TokenKv(self._kv[0], self._lead, np.flatnonzero(self._tables[0].owners == number))
        return TokenKv(self._kv[self.row_of(number)], self._lead)

    @property
    def stays(self) -> bool:
        """Whether all of a sequence stays where it is when it is over, until another has its number."""
        return self.states is None and (self._compact is None or not (self._pooled or self._rectangular))


def _moves(table: SlotTable, reach: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield live slots after dead ones, ascending, in parts within `reach` slots, and where each part goes."""
    alive = np.flatnonzero(table.owners != EMPTY)
    to = int(np.argmax(alive != np.arange(len(alive)))) if len(alive) and alive[-1] >= len(alive) else len(alive)
    while to < len(alive):
        count = int(np.searchsorted(alive, alive[to] + reach)) - to
        yield to, alive[to : to + count]
        to += count
