"""The partial arena of a session's target: sink | retrieval | window | buffer, for steps behind a long context.

It stands for the tokens that had rows in the full arena when it was filled; those of later steps lie in the buffer. A
step over it is a step like any other, of the same engine: only the arena is another (DESIGN section 8).
"""

from __future__ import annotations

import logging

import numpy as np

from plans import names
from plans.errors import PlanError
from plans.partial_kv import PartialKv
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import TargetStep
from runtime.execution.target_pass import Passed, TargetArena
from runtime.kv.slots import BRANCH, SlotTable

_LOG = logging.getLogger("outrider")


class PartialArena(TargetArena):
    """`budget` blocks are retrieved at the next `fill`. Broken once, it is never ready again."""

    def __init__(
        self, settings: PartialKv, buffers: Buffers, step: TargetStep, refresh: Program, longest_draft: int
    ) -> None:
        super().__init__(SlotTable(names.PARTIAL, buffers, step), settings.largest)
        self.settings, self._refresh = settings, refresh
        self._most = 1 + longest_draft  # tokens of a step
        self._kept_rows = buffers.of(names.TARGET, names.KEPT_ROWS)
        self._kept_count = buffers.of(names.TARGET, names.KEPT_COUNT)
        self._covered, self._summarised, self._budget, self._resident = (
            buffers.of(names.PARTIAL, name) for name in (names.COVERED, names.SUMMARISED, names.BUDGET, names.RESIDENT)
        )
        self._resident.fill(-1)
        self.budget = settings.n_retrieval_blocks
        self._front = 0  # slots in front of the buffer; 0: it stands for nothing
        self._steps = 0  # since it was filled
        self.broken = False

    @property
    def known(self) -> int:
        return int(self._covered[0]) + self.slots.length - self._front if self._front else 0

    def program(self, name: str) -> str:
        return names.partial(name)

    @property
    def room(self) -> int:
        """Tokens for which there is room in the buffer; there is none before it was filled."""
        return self.settings.n_spec_tokens_buf - (self.slots.length - self._front) if self._front else 0

    def ready(self, tokens: int) -> bool:
        """Whether the next step of a sequence of so many tokens may run here: only its tip lacks a row, and there is
        room for a whole step and one token more (FEATURES rows 34 and 35)."""
        fits = self._steps < self.settings.full_refresh_interval and self._most < self.room
        return not self.broken and self.known == tokens - 1 and fits

    def wanted(self, rows: int) -> bool:
        """Whether it pays to fill it from so many rows of the full arena."""
        return not self.broken and self.settings.pays(rows, self.budget)

    def fill(self, rows: int, passed: Passed) -> bool:
        """Take the full arena's first `rows` rows, the blocks chosen by the queries of what a pass over it has kept.

        Returns whether that went well.
        """
        if passed.program.kept is None:
            self._kept_rows[: passed.pending] = np.arange(passed.pending)
            self._kept_count[0] = passed.pending
        self.forget()
        settings = self.settings
        self._covered[0], self._budget[0] = rows, self.budget
        try:
            self._refresh.run()
        except PlanError as error:
            self.give_up(str(error))
            return False
        self._summarised[0] = max(int(self._summarised[0]), settings.candidates(rows))
        self._front = settings.filled(rows, self.budget)
        self.slots.restore(self._front, BRANCH, rows - self._front)  # of which only the last position is asked for
        self._steps = 0
        return True

    def note_step(self) -> None:
        """A step has run here, and its rows were committed."""
        self._steps += 1

    def forget(self) -> None:
        """It stands for nothing any more."""
        self.slots.truncate(0)
        self._front = 0

    def truncate(self, length: int) -> None:
        """The sequence now has `length` tokens, those before them unchanged."""
        settings = self.settings
        self._summarised[0] = min(
            int(self._summarised[0]), max(0, length // settings.block_size - settings.n_sink_blocks)
        )
        if length < self._covered[0]:
            self._resident.fill(-1)
        if length < self.known:
            self.forget()

    def give_up(self, reason: str) -> None:
        """Something does not hold: from now on the full arena serves alone."""
        _LOG.warning("partial KV is off for this session, which goes on with full KV: %s", reason)
        self.broken = True
        self.forget()
