"""Which KV cache the next pass of a sequence reads: the full one, or its row of the partial one.

In lossless mode, passes over the partial cache make tentative tokens, which one pass over the full cache confirms or
retracts; in lossy mode their tokens count.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import numpy as np

from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Geometry, longest_draft
from outrider.plans.partial_kv import PartialKv
from outrider.runtime.drafters.base import Draft
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.assembly import Assembly, LoadedPlan
from outrider.runtime.execution.layout import Placement
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.partial import PartialCache
from outrider.runtime.kv.partial_policy import Budget
from outrider.runtime.kv.run_ahead import Intervals, RunAhead
from outrider.runtime.sequence import Sequence


class PartialPasses:
    """The partial caches of an engine's rows, and what decides when they are read."""

    def __init__(
        self, settings: PartialKv, loaded: LoadedPlan, parts: Assembly, full: KvCache, drafting: Drafting
    ) -> None:
        target: Geometry = loaded.manifest.target
        self._full, self._drafting, self._target, self._step = full, drafting, target, parts.step
        rectangular = loaded.plan.engines[names.TARGET].rectangular
        self.cache = KvCache(names.PARTIAL, parts.buffers, parts.step, target, rectangular=rectangular)
        parts.buffers.array(names.PARTIAL, names.LAYER_WINDOWS)[:] = target.layer_windows or 0
        longest, refresh = longest_draft(loaded.manifest.drafters), parts.programs[names.REFRESH]
        self._rows = [
            PartialCache(settings, parts.buffers, table, refresh, longest, row)
            for row, table in enumerate(self.cache.tables)
        ]
        self._intervals = Intervals(parts.step.max_nodes)

    def cache_for(self, sequence: Sequence) -> PartialCache:
        """The partial cache of the sequence's row."""
        return self._rows[self._full.row_of(sequence.number)]

    def arrange(self, *, pooled: bool) -> None:
        """Forget everything, as `KvCache.arrange` does."""
        self.cache.arrange(pooled=pooled)
        for each in self._rows:
            each.reset()

    def begin(self, sequence: Sequence) -> None:
        """Prepare a generation of the sequence, as its request asks for partial KV."""
        request, tokens = sequence.request, len(sequence.tokens)
        sequence.partial = sequence.ahead = None
        sequence.queries = None
        if request.partial_kv == "off":
            return
        partial = sequence.partial = self.cache_for(sequence)
        settings, asked = partial.settings, request.partial_budget
        most = settings.n_retrieval_blocks
        fixed = None if asked == "auto" else most if asked is None else asked
        needed = settings.least_budget(self._target.widest_window)
        sequence.budget = Budget(most, fixed, tokens // settings.block_size, sequence.end - tokens, needed)
        if request.partial_kv == "lossless":
            sequence.ahead = RunAhead(
                self._intervals.interval_for(request, tokens),
                sequence.budget,
                sequence.generation.stats,
                request.eos_token_ids,
                always=not request.auto_disable,
            )

    @property
    def _most_tentative(self) -> int:
        """Number of a sequence's tokens that a pass can confirm, however many it confirms in other rows."""
        rows = 1 if self._full.pooled else self._target.rows
        return (self._step.max_nodes + 1) // rows - 1

    def divide(self, sequences: Iterable[Sequence], passes: int) -> tuple[list[Sequence], dict[Sequence, int]]:
        """Divide sequences by the cache that their next pass reads: those of the full one, and those of the partial one
        with the number of tokens that each may add there. `passes` counts the target's.

        One pass over the full cache confirms all tentative tokens, so any sequence that confirms brings the others.
        """
        full: list[Sequence] = []
        partial_room: dict[Sequence, int] = {}
        for each in sequences:
            if room := self._partial_room(each, passes) if each.partial is not None else 0:
                partial_room[each] = room
            else:
                full.append(each)
        if any(each.tentative for each in full):
            full += [each for each in partial_room if each.tentative]
            partial_room = {each: room for each, room in partial_room.items() if not each.tentative}
        return full, partial_room

    def _partial_room(self, sequence: Sequence, passes: int) -> int:
        """Most tokens that the sequence's next pass may add over the partial cache, which is filled where that is due;
        0 where the pass reads the full cache."""
        partial, ahead, tokens = sequence.partial, sequence.ahead, len(sequence.tokens)
        assert partial is not None
        if ahead is None:
            return sequence.end - tokens if partial.ready(tokens) else 0
        if sequence.confirmed is None and sequence.computed != tokens - 1:
            return 0
        waiting = len(sequence.tentative)
        room = ahead.room(tokens, waiting, sequence.end, self._most_tentative)
        if room and not waiting:
            began = perf_counter()
            self._fill(sequence, passes)
            ahead.note_fill(1000 * (perf_counter() - began))
        return room if room and partial.ready(tokens) else 0

    def _fill(self, sequence: Sequence, passes: int) -> None:
        """Fill the sequence's partial cache, unless it is up to date, by the queries of a pass over the full one; the
        next pass overwrites these."""
        partial, budget, stats = sequence.partial, sequence.budget, sequence.generation.stats
        assert partial is not None
        assert budget is not None
        if sequence.queries is None or (partial.computed == sequence.computed and partial.budget == budget.blocks):
            return
        (queries, asked_in), sequence.queries = sequence.queries, None
        partial.budget = budget.blocks
        computed = sequence.computed
        if asked_in == passes and partial.wanted(computed) and partial.fill(computed, queries, sequence.number):
            stats.refreshes += 1
            stats.retrieved = partial.budget

    def begin_pass(self, sequence: Sequence) -> int:
        """Prepare a pass over the partial cache, which may make tentative tokens; return the first token to feed."""
        assert sequence.partial is not None
        if sequence.ahead is not None and not sequence.disabled:
            sequence.confirmed = len(sequence.tokens) if sequence.confirmed is None else sequence.confirmed
            self._drafting.mark_tentative(sequence, sequence.confirmed)
        return sequence.partial.computed

    def to_confirm(self, sequence: Sequence) -> Draft:
        """Retract the sequence's tentative tokens, and return them as a draft: a chain after its tip."""
        assert sequence.confirmed is not None
        limit = min(self._most_tentative, sequence.end - sequence.confirmed - 1)
        chain = sequence.tentative[: max(limit, 0)]
        self.retract(sequence)
        return Draft(chain, range(-1, len(chain) - 1))

    def retract(self, sequence: Sequence) -> None:
        """Discard the sequence's tentative tokens, with their KV and what drafters know of them."""
        if sequence.confirmed is None:
            return
        confirmed, sequence.confirmed = sequence.confirmed, None
        if len(sequence.tokens) > confirmed:
            del sequence.tokens[confirmed:]
            assert sequence.partial is not None
            sequence.partial.truncate(confirmed)
            self._drafting.truncate(sequence, confirmed)
        self._drafting.mark_tentative(sequence, None)
        if sequence.ahead is not None:
            sequence.ahead.over = False

    def disable(self, sequence: Sequence, error: PlanError) -> None:
        """Let the sequence continue over the full cache for good, after a pass over the partial one has failed."""
        assert sequence.partial is not None
        sequence.partial.disable(str(error))
        self.retract(sequence)

    def note_step(self, placed: Iterable[Placement], passes: int, *, over_partial: bool) -> None:
        """Take note of a committed pass: partial caches count their steps; in lossy mode, a full pass fills them."""
        for each in placed:
            sequence = each.sequence
            if sequence.partial is None:
                continue
            if over_partial:
                sequence.partial.note_step()
            elif each.root >= 0:
                mine = each.kept
                sequence.queries = np.arange(each.fed) if mine is None else mine.copy(), passes
                if sequence.ahead is None:
                    self._fill(sequence, passes)
