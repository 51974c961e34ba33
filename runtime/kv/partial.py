"""The partial KV cache of the target: sink | retrieval | window | buffer, for steps after a long context.

It stands for the tokens that had KV in the full cache when it was filled; those of later steps lie in the buffer. A
pass over it is a pass like any other, of the same engine: only the cache is another. Of layers that see the last tokens
alone, the blocks retrieved are the last ones, so that they see the same as in the full cache.

It has room for one sequence, and is filled from a row that holds one in order. Several sequences that share a row read
the full cache, where a pass reads the prefix that they share once for all of them: tentative tokens of each, and their
confirmation, would cost more. When a sequence is opened in the row, the partial cache is emptied.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.partial_kv import PartialKv
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.program import Program
from outrider.runtime.kv.slots import SlotTable

_LOG = logging.getLogger("outrider")


class PartialCache:
    """The partial cache of one row. `budget` blocks are retrieved at the next `fill`. After a failure it is never ready
    again.
    """

    def __init__(
        self,
        settings: PartialKv,
        buffers: Buffers,
        slots: SlotTable,
        refresh: Program,
        longest_draft: int,
        row: int,
    ) -> None:
        self.settings, self._slots, self._refresh, self._row = settings, slots, refresh, row
        self._most = 1 + longest_draft  # tokens of a step
        self._kept_indices = buffers.array(names.TARGET, names.KEPT_INDICES)
        self._kept_count = buffers.array(names.TARGET, names.KEPT_COUNT)
        self._asked = tuple(
            buffers.array(names.PARTIAL, name) for name in (names.ROW, names.COVERED, names.SUMMARISED, names.BUDGET)
        )  # of `refresh`, whichever row it fills
        self._buffers, self._resident = buffers, buffers.array(names.PARTIAL, names.RESIDENT)[row]
        self.budget = settings.n_retrieval_blocks
        self.reset()

    def reset(self) -> None:
        """Prepare for another sequence in the row."""
        self._empty()
        self._covered = self._summarised = 0  # tokens that it was filled from; blocks of the row that have a summary
        self._steps = 0  # since it was filled
        self.broken = False
        self.forget()

    def _empty(self) -> None:
        """No block is here any more."""
        self._resident.fill(-1)
        self._buffers.send_rows(names.PARTIAL, names.RESIDENT, self._row, self._row + 1)

    @property
    def computed(self) -> int:
        """Number of leading tokens of the sequence that the cache stands for."""
        return self._covered + self._slots.length - self._front if self._front else 0

    @property
    def room(self) -> int:
        """Number of tokens that the buffer has room for; none before the cache was filled."""
        return self.settings.n_spec_tokens_buf - (self._slots.length - self._front) if self._front else 0

    def ready(self, tokens: int) -> bool:
        """Whether the next step of a sequence of `tokens` tokens may run here: only its tip lacks KV, and there is room
        for a whole step and one token more."""
        fits = self._steps < self.settings.full_refresh_interval and self._most < self.room
        return not self.broken and self.computed == tokens - 1 and fits

    def fill(self, tokens: int, queries: NDArray[np.int64], number: int) -> bool:
        """Take the KV of the first `tokens` of the sequence of this number; blocks are chosen by the queries of these
        tokens of the pass that ran last, over the full cache.

        Returns whether that went well; not before it pays.
        """
        if self.broken or not self.settings.pays(tokens, self.budget):
            return False
        self._kept_indices[: len(queries)] = queries
        self._kept_count[0] = len(queries)
        self.forget()
        settings = self.settings
        self._covered = tokens
        for value, asked in zip((self._row, tokens, self._summarised, self.budget), self._asked, strict=True):
            asked[0] = value
        try:
            self._refresh.run()
        except PlanError as error:
            self.disable(str(error))
            return False
        self._summarised = max(self._summarised, settings.candidates(tokens))
        self._front = settings.filled(tokens, self.budget)
        self._slots.claim(self._front, number, tokens - self._front)  # the last position alone is asked for
        self._steps = 0
        return True

    def note_step(self) -> None:
        """Count a step over this cache, whose KV was committed."""
        self._steps += 1

    def forget(self) -> None:
        """Discard what the row was filled with."""
        self._slots.truncate(0)
        self._front = 0  # slots in front of the buffer; 0: it stands for nothing

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the sequence."""
        settings = self.settings
        self._summarised = min(self._summarised, max(0, length // settings.block_size - settings.n_sink_blocks))
        if length < self._covered:
            self._empty()
        if length < self.computed:
            self.forget()

    def disable(self, reason: str) -> None:
        """Disable the cache after a failure: from now on, passes read the full cache alone."""
        _LOG.warning("partial KV is off for this sequence, which continues with full KV: %s", reason)
        self.broken = True
        self.forget()
