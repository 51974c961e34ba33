"""Which KV cache the next pass of a sequence reads: the full one, or its row of the partial one.

In lossless mode, passes over the partial cache make tentative tokens, which one pass over the full cache confirms or
retracts; in lossy mode their tokens count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.manifest import Geometry, longest_draft
from outrider.plans.partial_kv import PartialKv
from outrider.runtime.drafters.base import Draft, chain_draft
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.assembly import Assembly, LoadedPlan
from outrider.runtime.execution.layout import Placement
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.partial import PartialCache
from outrider.runtime.kv.partial_policy import Budget
from outrider.runtime.kv.run_ahead import Intervals, RunAhead
from outrider.runtime.sequence import Sequence


@dataclass(slots=True)
class PartialRun:
    """What a generation reads of its row's partial cache: `budget` counts the blocks that `cache` retrieves, `ahead`
    decides over tentative tokens in lossless mode. `queries` are token indices of the last pass over the full cache,
    and which pass that was."""

    cache: PartialCache
    budget: Budget
    ahead: RunAhead | None = None
    queries: tuple[NDArray[np.int64], int] | None = None


class PartialPasses:
    """The partial caches of a step loop's rows, and what decides when they are read."""

    def __init__(
        self, settings: PartialKv, loaded: LoadedPlan, assembly: Assembly, full: KvCache, drafting: Drafting
    ) -> None:
        target: Geometry = loaded.manifest.target
        self._full, self._drafting, self._target, self._step = full, drafting, target, assembly.step
        rectangular = loaded.plan.engines[names.TARGET].rectangular
        self.cache = KvCache(names.PARTIAL, assembly.buffers, assembly.step, target, rectangular=rectangular)
        assembly.buffers.array(names.PARTIAL, names.LAYER_WINDOWS)[:] = target.layer_windows or 0
        longest, refresh = longest_draft(loaded.manifest.drafters), assembly.programs[names.REFRESH]
        self._rows = [
            PartialCache(settings, assembly.buffers, table, refresh, longest, row)
            for row, table in enumerate(self.cache.tables)
        ]
        self._intervals = Intervals(assembly.step.max_nodes)
        self._runs: dict[int, PartialRun] = {}  # by number

    def cache_for(self, sequence: Sequence) -> PartialCache:
        """The partial cache of the sequence's row."""
        return self._rows[self._full.row_of(sequence.number)]

    def run_of(self, sequence: Sequence) -> PartialRun | None:
        """The run of the sequence's generation; None where it reads the full cache alone."""
        return self._runs.get(sequence.number)

    def ahead_of(self, sequence: Sequence) -> RunAhead | None:
        """What decides over the sequence's tentative tokens; None where it makes none."""
        run = self.run_of(sequence)
        return None if run is None else run.ahead

    def arrange(self, *, pooled: bool) -> None:
        """Forget everything, as `KvCache.arrange` does."""
        self.cache.arrange(pooled=pooled)
        self._runs.clear()
        for each in self._rows:
            each.reset()

    def begin(self, sequence: Sequence) -> None:
        """Prepare a generation of the sequence, as its request asks for partial KV."""
        generation, tokens = sequence.generation, len(sequence.tokens)
        request = generation.request
        if request.partial_kv == "off":
            return
        partial = self.cache_for(sequence)
        settings, asked = partial.settings, request.partial_budget
        most = settings.n_retrieval_blocks
        fixed = None if asked == "auto" else most if asked is None else asked
        needed = settings.least_budget(self._target.widest_window)
        budget = Budget(most, fixed, tokens // settings.block_size, generation.end - tokens, needed)
        run = self._runs[sequence.number] = PartialRun(partial, budget)
        if request.partial_kv == "lossless":
            run.ahead = RunAhead(
                self._intervals.interval_for(request, tokens),
                budget,
                generation.stats,
                request.eos_token_ids,
                always=not request.auto_disable,
            )

    @property
    def _most_tentative(self) -> int:
        """Number of a sequence's tokens that a pass can confirm, however many it confirms in other rows."""
        rows = self._full.sequences if self._full.pooled else self._target.rows
        return (self._step.max_nodes + 1) // rows - 1

    def divide(self, sequences: Iterable[Sequence], passes: int) -> tuple[list[Sequence], dict[Sequence, int]]:
        """Divide sequences by the cache that their next pass reads: those of the full one, and those of the partial one
        with the number of tokens that each may add there. `passes` counts the target's.

        One pass over the full cache confirms all tentative tokens, so any sequence that confirms brings the others.
        """
        full: list[Sequence] = []
        partial_room: dict[Sequence, int] = {}
        for each in sequences:
            run = self.run_of(each)
            if run is not None and (room := self._partial_room(each, run, passes)):
                partial_room[each] = room
            else:
                full.append(each)
        if any(each.tentative for each in full):
            full += [each for each in partial_room if each.tentative]
            partial_room = {each: room for each, room in partial_room.items() if not each.tentative}
        return full, partial_room

    def _partial_room(self, sequence: Sequence, run: PartialRun, passes: int) -> int:
        """Most tokens that the sequence's next pass may add over the partial cache, which is filled where that is due;
        0 where the pass reads the full cache."""
        partial, ahead, tokens, end = run.cache, run.ahead, len(sequence.tokens), sequence.generation.end
        if ahead is None:
            return end - tokens if partial.ready(tokens) else 0
        if sequence.confirmed is None and sequence.computed != tokens - 1:
            return 0
        waiting = len(sequence.tentative)
        room = ahead.room(tokens, waiting, end, self._most_tentative)
        if room and not waiting:
            began = perf_counter()
            self._fill(sequence, run, passes)
            ahead.note_fill(1000 * (perf_counter() - began))
        return room if room and partial.ready(tokens) else 0

    def _fill(self, sequence: Sequence, run: PartialRun, passes: int) -> None:
        """Fill the sequence's partial cache, unless it is up to date, by the queries of a pass over the full one; the
        next pass overwrites these."""
        partial, budget, stats = run.cache, run.budget, sequence.generation.stats
        if run.queries is None or (partial.computed == sequence.computed and partial.budget == budget.blocks):
            return
        (queries, asked_in), run.queries = run.queries, None
        partial.budget = budget.blocks
        computed = sequence.computed
        if asked_in == passes and self._full.in_order and partial.fill(computed, queries, sequence.number):
            stats.refreshes += 1
            stats.retrieved = partial.budget

    def begin_pass(self, sequence: Sequence) -> int:
        """Prepare a pass over the partial cache, which may make tentative tokens; return the first token to feed."""
        run = self._runs[sequence.number]
        if run.ahead is not None and not self._drafting.drafters_of(sequence).disabled:
            sequence.confirmed = len(sequence.tokens) if sequence.confirmed is None else sequence.confirmed
            self._drafting.mark_tentative(sequence, sequence.confirmed)
        return run.cache.computed

    def to_confirm(self, sequence: Sequence) -> Draft:
        """Retract the sequence's tentative tokens, and return them as a draft: a chain after its tip."""
        assert sequence.confirmed is not None
        limit = min(self._most_tentative, sequence.generation.end - sequence.confirmed - 1)
        chain = sequence.tentative[: max(limit, 0)]
        self.retract(sequence)
        return chain_draft(chain)

    def retract(self, sequence: Sequence) -> None:
        """Discard the sequence's tentative tokens, with their KV and what drafters know of them."""
        if sequence.confirmed is None:
            return
        run, confirmed, sequence.confirmed = self._runs[sequence.number], sequence.confirmed, None
        assert run.ahead is not None
        run.ahead.over = False
        del sequence.tokens[confirmed:]
        run.cache.truncate(confirmed)
        self._drafting.truncate(sequence, confirmed)
        self._drafting.mark_tentative(sequence, None)

    def finish(self, sequence: Sequence) -> None:
        """The generation is over: keep KV of the sequence's tokens alone, not of any accepted after its end."""
        self.retract(sequence)
        self.cache_for(sequence).truncate(len(sequence.tokens))
        self._runs.pop(sequence.number, None)

    def disable(self, sequence: Sequence, error: PlanError) -> None:
        """Let the sequence continue over the full cache for good, after a pass over the partial one has failed."""
        self._runs[sequence.number].cache.disable(str(error))
        self.retract(sequence)

    def note_step(self, placed: Iterable[Placement], passes: int, *, over_partial: bool) -> None:
        """Take note of a committed pass: partial caches count their steps; in lossy mode, a full pass fills them."""
        for each in placed:
            run = self.run_of(each.sequence)
            if run is None:
                continue
            if over_partial:
                run.cache.note_step()
            elif each.root >= 0:
                mine = each.kept
                run.queries = np.arange(each.fed) if mine is None else mine.copy(), passes
                if run.ahead is None:
                    self._fill(each.sequence, run, passes)
