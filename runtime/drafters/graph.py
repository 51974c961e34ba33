"""A drafter that is an engine with an arena: an EAGLE3 head or a small decoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Geometry, GraphDrafter
from runtime.drafters.kept_rows import KeptRows
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import DraftStep, TargetStep
from runtime.kv.slots import BRANCH


class EngineDrafter:
    """Row i of its arena is token i (`model`), or the pair of the target's feature i and token i + 1 (`eagle3`).

    Features stay in the target's buffer until its next pass; `_first` and `_rows` say which positions' they are and
    where they lie. What the levels of a draft append is dropped by length, but for a model's rows of accepted nodes,
    where its engine leaves them in the arena (`keeps_levels`).
    """

    filler_top_k = 0
    entropy: float | None = None

    def __init__(
        self,
        settings: GraphDrafter,
        geometry: Geometry,
        buffers: Buffers,
        step: DraftStep,
        extend: Program,
        compact: Program | None = None,
        *,
        keeps_levels: bool = True,
    ) -> None:
        self._name, self._keeps_levels = settings.name, keeps_levels
        self._tree, self._step, self._extend = settings.tree, step, extend
        self.kept = KeptRows(settings.name, geometry, buffers, step, int(settings.kind == "eagle3"))
        self._slots = self.kept.slots
        self._room = geometry.context
        self._paired = settings.kind == "eagle3"
        self._tree_rows = None if compact is None else _TreeRows(settings.name, buffers, step, compact)
        self.scores: NDArray[np.float32] = buffers.of(settings.name, names.TREE_SCORE)
        rejected = settings.acceptance == "rejection"
        self.trials: NDArray[np.float64] | None = buffers.of(names.TARGET, names.TRIALS) if rejected else None
        self._tip_position = buffers.of(settings.name, names.TIP_POSITION)
        self._feature_rows = buffers.of(settings.name, names.FEATURE_ROWS) if self._paired else None
        self._first, self._rows = 0, np.zeros(0, np.int64)
        self._passes = 0
        self._drafting = False
        self._supposing = False

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        end, models = length - self._paired, (names.TARGET, self._name)
        if length < self._room and length - 1 + self._tree.nodes <= step.largest_view:
            step.begin_warmup(length)
            for _ in self._feeds(end):
                step.expect_tree(self._tree.nodes)
                yield names.speculate(self._name), models
                if self._tree_rows is not None:
                    yield names.compact(self._name), (self._name,)
        yield from self.extensions(length, 1)

    def extensions(self, length: int, most: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Lay out what a head takes in at rounds without it that commit at most `most` tokens, as `rounds` does.

        A model catches up when it drafts again.
        """
        for fed in self._feeds(length - self._paired):
            if self._paired and fed <= most:
                yield names.extend(self._name), (self._name,)

    def _feeds(self, end: int) -> Iterator[int]:
        """Lay out the feeds that make the arena's rows end at `end`, of tokens that are 0."""
        assert self._step.buckets is not None
        for fed in reversed(self._step.buckets.new):
            if fed <= end:
                if self._feature_rows is not None:
                    self._feature_rows[:fed] = 0
                self._step.begin(end - fed, end - fed, [0] * fed, BRANCH)
                self._tip_position[BRANCH] = end - 1 + self._paired
                yield fed

    def truncate(self, length: int) -> None:
        self._drafting = False
        self.kept.truncate(max(length - self._paired, 0))
        self._rows = self._rows[: max(length - self._first, 0)]

    def suppose(self, length: int | None) -> None:
        """Discard target features of retracted tentative tokens; `truncate` drops their KV."""
        if length is None and self._supposing:
            self._rows = self._rows[:0]
        self._supposing = length is not None

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        self._drafting = False
        self.kept.truncate(max(len(tokens) - 1 - self._paired, 0))  # the tip is always fed again
        if not self._paired:
            return rows
        if passes != self._passes:
            self._rows = self._rows[:0]
        known = self._first <= self.kept.end and self._first + len(self._rows) >= rows
        if not known and self.kept.too_far(rows):  # computing what it missed would cost more than it is worth
            self.kept.skip_to(rows)
        return rows if known else min(rows, self.kept.end)

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        self._drafting = False
        nodes = self._tree.nodes
        if not self._lay_out(tokens, step, nodes):
            return None
        # The front of a chain is a chain. By rejection, tokens depend on it: then it is whole, as on every target.
        cut = self._tree.top_k == 1 and self.trials is None and step.buckets is None
        step.expect_tree(min(nodes, 1 + limit) if cut else nodes)
        self._drafting = True
        return names.speculate(self._name)

    def absorb(self, tokens: Sequence[int]) -> None:
        self._drafting = False  # a draft whose pass came to no end
        if self._paired and self._feed(tokens, min(len(tokens) - 1, self._first + len(self._rows))):
            self._extend.run()
            self._slots.commit(self._step.new_tokens, kept=None)

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """It does not ask for them."""

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        if self._drafting:
            assert kept is not None, "a draft is accepted by rows that are listed"
            self._slots.commit(self._step.new_tokens, kept=None)
            self._slots.continue_chain(self._keep(kept[1:rows]))
            self._drafting = False
        if self._paired:
            self._first, self._rows = start, np.arange(rows) if kept is None else kept[:rows].copy()
        self._passes = passes

    def _keep(self, path: NDArray[np.int64]) -> int:
        """How many of the accepted nodes `path` have rows that stay; these now follow the tip's."""
        if self._paired or not self._keeps_levels:
            return 0  # a head's were computed from hidden states of its own, not from the target's features
        if self._tree_rows is None:
            return min(len(path), self._tree.depth)  # a chain's are in place, one a level
        return self._tree_rows.gather(self._slots.length, path)

    def _lay_out(self, tokens: Sequence[int], step: TargetStep, nodes: int) -> bool:
        """Prepare the first pass of a draft; False where one of `nodes`, the tip included, has no room or no start."""
        past = int(step.past_length[0])
        if step.new_tokens != 1 or past + nodes > step.largest_view or len(tokens) >= self._room:
            return False
        if not self._feed(tokens, len(tokens) - self._paired):
            return False
        self._tip_position[BRANCH] = step.positions[0]
        return True

    def _feed(self, tokens: Sequence[int], end: int) -> bool:
        """Lay out what makes the arena's rows end at `end`; False where nothing does, or features are gone.

        More than a step holds go in with passes of their own.
        """
        kept, lead, most = self.kept, int(self._paired), self._step.most
        kept.pass_over(len(tokens), end)
        first = kept.end
        if first >= end or (self._paired and not self._first <= first <= end <= self._first + len(self._rows)):
            return False
        while True:
            count = min(end - first, most)
            if self._feature_rows is not None:
                offset = first - self._first
                self._feature_rows[:count] = self._rows[offset : offset + count]
            kept.make_room(count)
            self._step.begin(self._slots.length, first, list(tokens[first + lead : first + lead + count]), BRANCH)
            if first + count == end:
                return True
            self._extend.run()
            self._slots.commit(count, kept=None)
            kept.pass_over(len(tokens), end)
            first = kept.end


class _TreeRows:
    """Rows that the levels of a draft model's tree have appended to its arena, of rejected nodes and accepted ones."""

    def __init__(self, name: str, buffers: Buffers, step: DraftStep, compact: Program) -> None:
        self._step, self._compact = step, compact
        self._move_to = buffers.of(name, names.MOVE_TO)
        self._row = buffers.of(name, names.TREE_ROW)
        self._kept_rows = buffers.of(name, names.KEPT_ROWS)
        self._kept_count = buffers.of(name, names.KEPT_COUNT)

    def gather(self, start: int, path: NDArray[np.int64]) -> int:
        """Move those of the nodes on `path`, which begins at a child of the root, to `start`; return how many.

        Only the last node may have none: levels run whatever has a child. The rows ascend.
        """
        count = len(path)
        if count and self._row[path[-1]] < 0:
            count -= 1
        if count and self._row[path[count - 1]] >= count:  # else they are the first ones: in place
            np.take(self._row, path[:count], out=self._kept_rows[:count], mode="clip")
            self._kept_count[0], self._move_to[0] = count, start
            self._step.begin_grown(start)
            self._compact.run()
        return count
