"""What the rounds of a step loop run on: buffers, programs, KV caches, drafters, and the sequences that are open."""

from __future__ import annotations

from collections import abc
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import Manifest, longest_draft, rejects
from outrider.runtime.drafters.adaptive import AdaptiveSpeculations
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.assembly import LoadedPlan, assemble
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.ruled_walk import RuledWalk
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.run_ahead import RunAhead
from outrider.runtime.partial_passes import PartialPasses
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.client import CacheClient
from outrider.runtime.rounds.views import FullKv
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import Stopwatch


class Parts:
    """Owner of the caches, of the drafters and of the tables of sequences; the files beside it are functions of it."""

    def __init__(self, loaded: LoadedPlan, cache: PrefixCache | None, *, padded: bool) -> None:
        """Raises `PlanError` where the plan's programs cannot be resolved."""
        assembly = assemble(loaded)
        self.loaded = loaded
        self.manifest: Manifest = loaded.manifest
        self.geometry = loaded.manifest.target
        self.buffers, self.step, self.programs = assembly.buffers, assembly.step, assembly.programs
        self.draft_steps = assembly.draft_steps
        self.watch = Stopwatch()  # of the bookkeeping of slots, all models
        self.cache = KvCache(
            names.TARGET,
            assembly.buffers,
            assembly.step,
            self.geometry,
            assembly.programs.get(names.compact(names.TARGET)),
            padded=padded,
            rectangular=loaded.plan.engines[names.TARGET].rectangular,
        )
        self.drafting = Drafting(loaded, assembly, self.watch)
        settings = self.manifest.partial_kv
        self.partial = (
            None if settings is None else PartialPasses(settings, loaded, assembly, self.cache, self.drafting)
        )
        self.full = FullKv(self.cache, self.partial)
        self.prefix_cache = None if cache is None else CacheClient(cache, self.cache, self.drafting)
        self.adaptive = AdaptiveSpeculations(self.manifest, loaded.prices)
        self.ruled_walk = RuledWalk(assembly.buffers, assembly.step)
        self.halts = all(program.halts for program in self.programs.values() if program.tokens is not None)
        self.longest_draft = longest_draft(self.manifest.drafters)
        states = self.geometry.states  # log as many records as a draft of one sequence has nodes, and its tip
        self.most_nodes = self.step.max_nodes if states is None else min(self.step.max_nodes, states.log - 1)
        # Drafters accepted by rejection, and how much they draft at most.
        self.rejecting = {d.name: longest_draft([d]) for d in self.manifest.drafters if rejects([d])}
        self.prefix: list[int] = []
        self.live: dict[int, Sequence] = {}  # those that are generated, by number
        self.open: dict[int, Sequence] = {}  # those that have KV
        self.chosen_by: dict[int, Placement] = {}  # where the logits of each one's last tokens are
        self.passes = 0
        self.paused = 0.0  # seconds that callers had

    @property
    def sharing(self) -> CacheClient | None:
        """The prefix cache, where sequences are kept whole: they begin with no prefix of their own."""
        return None if self.prefix else self.prefix_cache

    @property
    def caches(self) -> list[KvCache]:
        """The caches of the target and of its drafters."""
        return [self.cache, *(drafter.cache for drafter in self.drafting.engine_drafters.values())]

    def run_ahead(self, sequence: Sequence) -> RunAhead | None:
        """What decides how far passes over the partial cache run ahead of the full one; None where they do not."""
        return None if self.partial is None else self.partial.ahead_of(sequence)

    def now(self) -> float:
        """Seconds of the loop's own time: callers' is left out."""
        return perf_counter() - self.paused

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """Logits f32 `[stop - start, vocab]` of the last pass: a view until the next one."""
        rows: NDArray[np.float32] = self.buffers.rows(names.TARGET, names.LOGITS_OUT, start, stop)
        return rows

    def truncate(self, sequence: Sequence, computed: int) -> None:
        """Drop the target's KV of a sequence after its first `computed` tokens, or more of it where states do not go
        back there."""
        sequence.computed = self.cache.truncate(sequence.number, computed)

    def catch_up_drafters(self, sequence: Sequence) -> None:
        """The sequence's drafters consume its tokens; the target recomputes those whose features they lack."""
        computed = self.drafting.catch_up(sequence, self.passes)
        if computed < sequence.computed:
            self.truncate(sequence, computed)

    def keep_beginnings(self, placed: abc.Iterable[Placement]) -> None:
        """Keep the KV of prompts in the prefix cache, as others that come meanwhile may begin alike; drafters have
        consumed them by the second round."""
        if (cache := self.sharing) is None or self.cache.alone:
            return
        for sequence in (each.sequence for each in placed):
            own = sequence.generation
            if not (sequence.over or own.inserted) and own.rounds > 1:
                cache.keep(sequence)
                own.inserted = True
