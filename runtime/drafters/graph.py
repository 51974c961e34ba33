"""A drafter that is an engine with an arena: an EAGLE3 head or a small decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Geometry, GraphDrafter
from runtime.arena import SlotMap
from runtime.buffers import Buffers
from runtime.program import Program
from runtime.step import Step, TargetStep

_BRANCH = 0  # a session is one branch


class EngineDrafter:
    """Row i of its arena is token i (`model`), or the pair of the target's feature i and token i + 1 (`eagle3`).

    Features stay in the target's buffer until its next pass; `_first` and `_rows` say which positions' they are and
    where they lie. What the levels of a draft append is dropped by length, but for the part of a chain that was
    accepted.
    """

    def __init__(
        self, settings: GraphDrafter, geometry: Geometry, buffers: Buffers, step: Step, extend: Program
    ) -> None:
        self._tree, self._step, self._extend = settings.tree, step, extend
        self._slots = SlotMap(settings.name, buffers, step)
        self._room = geometry.context
        self._paired = settings.kind == "eagle3"
        self._chain = settings.tree.top_k == 1 and not self._paired
        self.scores: NDArray[np.float32] = buffers.of(settings.name, names.TREE_SCORE)
        self._tip_position = buffers.of(settings.name, names.TIP_POSITION)
        self._feature_rows = buffers.of(settings.name, names.FEATURE_ROWS) if self._paired else None
        self._first, self._rows = 0, np.zeros(0, np.int64)
        self._passes = 0
        self._drafting = False

    def truncate(self, length: int) -> None:
        self._slots.truncate(max(length - self._paired, 0))
        self._rows = self._rows[: max(length - self._first, 0)]

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        self._drafting = False
        self._slots.truncate(max(len(tokens) - 1 - self._paired, 0))  # the tip is always fed again
        if not self._paired:
            return rows
        if passes != self._passes:
            self._rows = self._rows[:0]
        known = self._first <= self._slots.length and self._first + len(self._rows) >= rows
        return rows if known else min(rows, self._slots.length)

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> bool:
        nodes = self._tree.nodes
        past = int(step.past_length[0])
        if step.new_tokens != 1 or past + nodes > step.largest_view or len(tokens) >= self._room:
            return False
        if not self._feed(tokens, len(tokens) - self._paired):
            return False
        self._tip_position[_BRANCH] = step.positions[0]
        step.expect_tree(nodes)
        self._drafting = True
        return True

    def absorb(self, tokens: Sequence[int]) -> None:
        if self._paired and self._feed(tokens, min(len(tokens) - 1, self._first + len(self._rows))):
            self._extend.run()
            self._slots.commit(self._step.new_tokens, kept=None)

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        if self._drafting:
            self._slots.commit(self._step.new_tokens, kept=None)
            if self._chain:
                self._slots.continue_chain(min(rows - 1, self._tree.depth))
            self._drafting = False
        if self._paired:
            self._first, self._rows = start, np.arange(rows) if kept is None else kept[:rows].copy()
        self._passes = passes

    def _feed(self, tokens: Sequence[int], end: int) -> bool:
        """Lay out what makes the arena's rows end at `end`; False where nothing does, or features are gone.

        More than a step holds go in with passes of their own.
        """
        first, lead, most = self._slots.length, int(self._paired), self._step.most
        if self._feature_rows is not None:
            offset, count = first - self._first, end - first
            if offset < 0 or count < 1 or offset + count > len(self._rows):
                return False
            self._feature_rows[:count] = self._rows[offset : offset + count]
        while end - first > most:
            self._step.begin(first, first, list(tokens[first : first + most]), _BRANCH)
            self._extend.run()
            self._slots.commit(most, kept=None)
            first += most
        if first >= end:
            return False
        self._step.begin(first, first, list(tokens[first + lead : end + lead]), _BRANCH)
        return True
