"""The one step loop: propose, lay out, verify, accept, commit, for one sequence or many.

Every pass serves all sequences that it is given: it verifies the drafts of those that decode while it computes the
prompts of those that have just come. Each has the tokens that it would have alone, by its own seed, stream and limits.
"""

from __future__ import annotations

import logging
from collections import Counter, abc
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import OpError, PlanError, RequestError
from outrider.plans.manifest import Manifest, longest_draft, rejects
from outrider.runtime.branch_request import Mode
from outrider.runtime.drafters.adaptive import AdaptiveSpeculations
from outrider.runtime.drafters.base import Draft, TreeInPlace, clip_draft
from outrider.runtime.drafters.drafting import DraftBudget, Drafting
from outrider.runtime.drafters.engine import Choose
from outrider.runtime.execution.assembly import LoadedPlan, assemble
from outrider.runtime.execution.layout import Placement, lay_out, lay_out_one
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.ruled_walk import RuledWalk
from outrider.runtime.execution.warmup import warm_up
from outrider.runtime.generation import FinishReason, GrowingGeneration, Span
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.launched_rounds import Launch, LaunchedRounds
from outrider.runtime.options.request import Request
from outrider.runtime.partial_passes import PartialPasses
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.client import CacheClient
from outrider.runtime.round_costs import note_round
from outrider.runtime.sampling import SamplingParams, likeliest, logprobs
from outrider.runtime.sequence import CommittedTokens, Sequence
from outrider.runtime.stats import StageClock, Stats, Stopwatch
from outrider.runtime.text.rules import failing_alone
from outrider.runtime.text.stream import TextStream
from outrider.runtime.trace import read_round

_LOG = logging.getLogger("outrider")


class StepLoop:
    """Buffers, programs, KV caches and drafters for up to as many sequences as the plan has branches.

    Not safe under threads: whoever has borrowed it drives it. `show` alone may run beside the next step.
    """

    def __init__(self, loaded: LoadedPlan, cache: PrefixCache | None = None, *, padded: bool = False) -> None:
        """`padded`: rows of a batch are laid out as a rectangle, for engines of the target that need one.

        With `cache`, sequences find what was computed of earlier ones. Raises `PlanError` where the plan's programs
        cannot be resolved.
        """
        parts = assemble(loaded)
        self.manifest: Manifest = loaded.manifest
        self._loaded, self._geometry = loaded, loaded.manifest.target
        self.buffers, self.target_step, self.programs = parts.buffers, parts.step, parts.programs
        self._watch = Stopwatch()  # of the bookkeeping of slots, all models
        compact = self.programs.get(names.compact(names.TARGET))
        self.cache = KvCache(
            names.TARGET,
            parts.buffers,
            parts.step,
            self._geometry,
            compact,
            padded=padded,
            rectangular=loaded.plan.engines[names.TARGET].rectangular,
        )
        self.drafting = Drafting(loaded, parts, self._watch)
        settings = self.manifest.partial_kv
        self._partial = None if settings is None else PartialPasses(settings, loaded, parts, self.cache, self.drafting)
        self.prefix_cache = None if cache is None else CacheClient(cache, self.cache, self.drafting)
        self._adaptive = AdaptiveSpeculations(self.manifest, loaded.prices)
        self.mode: Mode = "in-one-sequence"
        self.prefix: list[int] = []
        self._prefix_computed, self._owner = 0, ""  # of the prefix
        self._free: list[int] = []
        self._live: dict[int, Sequence] = {}  # those that are generated, by number
        self._open: dict[int, Sequence] = {}  # those that have KV
        self.passes = 0
        self.paused = 0.0  # seconds that callers had
        self._longest_draft = longest_draft(self.manifest.drafters)
        # Drafters accepted by rejection, and how much they draft at most.
        self._rejecting = {d.name: longest_draft([d]) for d in self.manifest.drafters if rejects([d])}
        self._ruled_walk = RuledWalk(parts.buffers, parts.step)
        decoding = parts.programs[names.DECODE]
        self._launched = LaunchedRounds(decoding, parts.buffers, parts.step, self.cache, self._watch)
        self._halts = all(program.halts for program in self.programs.values() if program.tokens is not None)
        self.begin()
        exchange = parts.buffers.exchange
        if exchange is not None:  # before the programs, whose engines a launched round may still run
            finalize(self, exchange.wait_for_launches).atexit = False
        self.records = exchange is not None and exchange.records and bool(loaded.plan.buckets)
        if self.records:
            self._record(parts.draft_steps)

    def _record(self, draft_steps: Mapping[str, object]) -> None:
        """Run every size of round once, so that the device has recorded it before the first prompt."""
        exchange, started = self.buffers.exchange, perf_counter()
        assert exchange is not None
        self.buffers.set_sampling(0, SamplingParams())
        steps = {names.TARGET: self.target_step, **draft_steps}
        with exchange.recording():
            rounds = warm_up(self._geometry.context, steps, self.drafting.rounds, self.programs)  # type: ignore[arg-type]
        _LOG.info("warmed up %d rounds in %.1f s", rounds, perf_counter() - started)

    # Between runs.

    def begin(
        self,
        prefix: abc.Sequence[int] = (),
        drafters: Collection[str | None] = (),
        mode: Mode = "in-one-sequence",
        *,
        owner: str = "",
    ) -> bool:
        """Forget all sequences. New ones continue the owner's `prefix`, use these drafters, and share a row or have one
        each.

        Returns whether the KV of the prefix is here: else `compute_prefix` gives it.
        """
        self._launched.outstanding = None
        prefix, pooled = list(prefix), mode == "in-one-sequence"
        same = self.mode == mode and self._owner == owner and self.prefix == prefix
        here = bool(prefix) and same and self._prefix_computed == len(prefix)
        here = here and self.drafting.has_prefix(prefix, set(drafters))
        if here:
            self.cache.rewind()
        else:
            self.cache.arrange(pooled=pooled)
            self._prefix_computed = 0
        self.drafting.begin(prefix, set(drafters), pooled=pooled, here=here)
        self.mode, self.prefix, self._owner = mode, prefix, owner
        self._free = list(range(self._geometry.branches - 1, -1, -1))
        for number in self._free:
            self._set_greedy(number)
        self._live.clear()
        self._open.clear()
        if self._partial is not None:
            self._partial.arrange(pooled=pooled)
        if self.prefix_cache is not None:
            self.prefix_cache.forget()
        self.paused = 0.0
        return here

    def recall_prefix(self) -> int:
        """Copy in what the prefix cache knows of a prefix that has just begun; how many tokens that is."""
        if self.prefix_cache is not None:
            self._prefix_computed = self.prefix_cache.recall_prefix(self.prefix, self._owner)
        return self._prefix_computed

    def compute_prefix(self) -> Iterator[None]:
        """Compute what the prefix lacks of KV, a pass at a time; before each of them, the caller may stop."""
        chunk, prefill = self._geometry.prefill_chunk, self.programs[names.PREFILL]
        began = self._prefix_computed
        while tokens := self.prefix[self._prefix_computed : self._prefix_computed + chunk]:
            yield
            self.cache.begin({})
            self.cache.append(tokens, self._prefix_computed, 0)
            prefill.run()
            self.passes += 1
            self.cache.commit_prefix(len(tokens))
            for drafter in self.drafting.of_prefix:
                drafter.sync_prefix(self._prefix_computed, len(tokens))
            self._prefix_computed += len(tokens)
        if self.prefix_cache is not None and self._prefix_computed > began:
            self.prefix_cache.keep_prefix(self.prefix, self._owner)

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """Open sequences: those that have KV here."""
        return list(self._open.values())

    def now(self) -> float:
        """Seconds of the engine's own time: callers' is left out."""
        return perf_counter() - self.paused

    @contextmanager
    def counting(self, stats: Stats) -> Iterator[None]:
        """Measure what runs meanwhile; `stats` is filled at the end."""
        clock = self.stage_clock()
        self._watch.ms = 0.0
        try:
            yield
        finally:
            clock.fill(stats)
            caches = [self.cache, *(drafter.cache for drafter in self.drafting.engine_drafters.values())]
            stats.state_ms = self._watch.ms
            stats.bytes_copied = sum(cache.bytes_copied for cache in caches)
            stats.kv_operations = dict(sum((cache.operations for cache in caches), Counter()))
            stats.compactions = sum(cache.compactions for cache in caches)
            stats.kv_bytes = sum(cache.peak_slots * cache.slot_bytes for cache in caches)

    def stage_clock(self) -> StageClock:
        """Times of all stages from now on."""
        return StageClock([*self.programs.values(), *self.drafting.host_times.values(), self._ruled_walk])

    def warm_up(self, mode: Mode) -> None:
        """Run a pass of as many sequences as there can be, so that no later one waits for memory to be handed out."""
        kept, self.prefix_cache = self.prefix_cache, None
        self.begin(mode=mode)
        running = [self.admit(number, [0], Request(1)) for number in range(self._geometry.branches)]
        for committed in self.step(running):
            self.show(committed)
        self.settle(running)
        self.prefix_cache = kept

    # Sequences.

    def fits(self, tokens: int, request: Request) -> bool:
        """Whether there is room for one more sequence of `tokens` tokens after the prefix, however long the others get.

        Capacity is reserved: where a sequence ends never depends on its neighbours. Drafts take what is left, but for
        those by rejection, which tokens depend on.
        """
        own = [self._end(len(self.prefix) + tokens, request) - len(self.prefix) + self._reserved(request)]
        own += [each.end - each.shared + self._reserved(each.request) for each in self._open.values()]
        return bool(self._free) and self.cache.holds(own, self._geometry.prefill_chunk)

    def _reserved(self, request: Request) -> int:
        """Slots for the drafts of a request in the row that all share."""
        return self._rejecting.get(request.drafter or "", 0) if self.cache.pooled else 0

    def _end(self, tokens: int, request: Request) -> int:
        return min(self._geometry.context, tokens + request.max_new_tokens)

    def open(self, tokens: abc.Sequence[int] = (), *, number: int | None = None, id: int = 0) -> Sequence:
        """A sequence of `tokens` after the prefix; it gets `number`, one that is free, or the lowest."""
        number = self._free[-1] if number is None else number
        self._free.remove(number)
        shared = len(self.prefix)
        sequence = Sequence(id, number, [*self.prefix, *tokens], shared=shared, computed=shared)
        self._open[number] = sequence
        self.cache.open(number)
        if self._partial is not None:
            self._partial.cache_for(sequence).reset()
        return sequence

    def admit(self, id: int, tokens: abc.Sequence[int], request: Request) -> Sequence:
        """Open a sequence that fits, and begin its generation; its spans carry `id`."""
        number = None
        if self.prefix_cache is not None and not self.prefix:
            number = self.prefix_cache.number_for(tokens, request.cache_salt, self._free)
        sequence = self.open(tokens, number=number, id=id)
        text = TextStream(self._loaded.tokenizer, sequence.tokens, request.stop)
        self.start(sequence, request, text)
        return sequence

    def start(self, sequence: Sequence, request: Request, text: TextStream) -> None:
        """Generate after the sequence's tokens from now on; what it is generated for ends with `finish`.

        Tokens that the request has given before follow those at once.
        """
        tokens = sequence.tokens
        if request.rules and not self._halts:
            request = replace(request, drafter=None)
        given = len(request.generated)
        stats = Stats(prompt_tokens=len(tokens), resumed_tokens=given, partial_mode=request.partial_kv)
        sequence.owner = request.cache_salt
        sequence.request, sequence.generation = request, GrowingGeneration(request, text, stats)
        sequence.began, sequence.rounds, sequence.inserted = self.now(), 0, False
        sequence.reason = sequence.stuck = sequence.error = sequence.chosen_by = None
        sequence.stopped, sequence.watched, sequence.unseen = False, False, 0
        sequence.prompted = len(tokens)
        sequence.rules = tuple(rule.begin(tokens) for rule in request.rules)
        sequence.end = self._end(len(tokens), request)
        tokens += request.generated
        self.buffers.set_sampling(sequence.number, request.sampling)
        self.buffers.arrays[names.BY_REJECTION][sequence.number] = request.drafter in self._rejecting
        sequence.computed = min(sequence.computed, len(tokens) - 1)
        self._truncate_caches(sequence, sequence.computed)
        self.drafting.attach(sequence, request)
        if self.prefix_cache is not None and not self.prefix:
            stats.cached_tokens = self.prefix_cache.recall(sequence)
        sequence.adaptive = self._adaptive.take(request)
        sequence.disabled = sequence.adaptive is not None and sequence.adaptive.disabled
        if not sequence.disabled:
            self._catch_up_drafters(sequence)
        stats.reused_tokens = sequence.computed
        if self.prefix_cache is not None and not self.prefix:
            self.prefix_cache.note_reused(stats.reused_tokens)
        self._live[sequence.number] = sequence
        if self._partial is not None:
            self._partial.begin(sequence)

    def _catch_up_drafters(self, sequence: Sequence, *, fresh: bool = True) -> None:
        """The sequence's drafters consume its tokens; the target recomputes those whose features they lack. Unless
        `fresh`, they keep their estimates for it."""
        computed = self.drafting.catch_up(sequence, self.passes, fresh=fresh)
        if computed < sequence.computed:
            self._truncate_caches(sequence, computed)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        self._launched.drop(sequence)
        if sequence.chosen_by is not None and length < sequence.chosen_by.start + sequence.chosen_by.fed:
            sequence.chosen_by = None
        del sequence.tokens[length:]
        self._truncate_caches(sequence, min(length, sequence.computed))
        if self._partial is not None:
            self._partial.cache_for(sequence).truncate(length)
        self.drafting.truncate(sequence, length)

    def _truncate_caches(self, sequence: Sequence, computed: int) -> None:
        self.cache.truncate(sequence.number, computed)
        sequence.computed = computed

    def finish(self, sequence: Sequence, *, wait: bool = True) -> None:
        """End the generation; the sequence keeps its tokens and their KV.

        Without `wait`, the prefix cache takes them only where no other thread is at it.
        """
        if self._live.pop(sequence.number, None) is None:
            return
        self._launched.drop(sequence)
        if self._prompt_damaged(sequence):  # cancelled before its first token
            self._roll_back(sequence, sequence.shared)
        if sequence.computed > len(sequence.tokens):
            self._truncate_caches(sequence, len(sequence.tokens))
        if self._partial is not None:
            self._partial.retract(sequence)
        self._adaptive.give_back(sequence.request, sequence.adaptive)
        if self.prefix_cache is not None and not self.prefix:
            if sequence.engine_drafter is not None and not sequence.disabled and self.cache.alone:
                sequence.engine_drafter.sync(sequence)  # what the last pass has left
            self.prefix_cache.keep(sequence, wait=wait)

    def release(self, sequence: Sequence) -> None:
        """Close a sequence; its slots and its number can be used again."""
        self.finish(sequence)
        if self.prefix_cache is not None and not self.prefix:
            self.prefix_cache.leave(sequence)
        del self._open[sequence.number]
        self._set_greedy(sequence.number)
        self._free.append(sequence.number)
        self._free.sort(reverse=True)
        self.cache.close(sequence.number)
        self.drafting.close(sequence)

    def _set_greedy(self, number: int) -> None:
        """Leave a number to no one: drafters compute noise for those that sample."""
        self.buffers.set_sampling(number, SamplingParams())

    def settle(self, running: list[Sequence]) -> None:
        """Release sequences that are over, and take them out of `running`."""
        for each in [each for each in running if each.over]:  # once: texts may end meanwhile
            self.release(each)
            running.remove(each)

    # A step.

    def step(self, sequences: abc.Sequence[Sequence], chunk: int | None = None) -> list[CommittedTokens]:
        """One round of all: propose, lay out, verify, accept, commit. Returns the tokens that each sequence gets.

        A pass takes at most `chunk` tokens of prompts (default: all that it has room for). Sequences that are over are
        left out. A pass that an op refuses is retried one sequence at a time; one that is refused again ends with the
        error. Sequences that read the partial KV cache have a pass of their own, and none while a sequence needs the
        features of the pass before for its next draft (`Drafting.needs_features`). On a device, rounds of sequences
        that all are `plain` are launched a step ahead (`LaunchedRounds`).

        Raises PlanError where the plan was written over, before anybody hears of the pass.
        """
        found = self._step(sequences, chunk or self._geometry.prefill_chunk)
        self._loaded.files.check()
        return found

    def _step(self, sequences: abc.Sequence[Sequence], chunk: int) -> list[CommittedTokens]:
        found: list[CommittedTokens] = []
        full: list[Sequence] = []
        partial_room: dict[Sequence, int] = {}
        for each in sequences:
            if each.over:
                continue
            if each.stuck is not None:
                each.error = each.stuck
                found.append(CommittedTokens(each, [], error=each.error))
                continue
            if each.request.cancelled:
                self._launched.drop(each)
                each.reason = FinishReason.CANCELLED
                found.append(CommittedTokens(each, [], reason=each.reason))
                continue
            if each.adaptive is not None and each.disabled != each.adaptive.disabled and not each.tentative:
                self._switch(each)
            full.append(each)
        if self._launched.outstanding is not None or (full and self._launched.serves(full)):
            return found + self._step_behind(full, chunk)
        if self._partial is not None and not self.drafting.needs_features(self._live.values()):
            full, partial_room = self._partial.divide(full, self.passes)
        if partial_room:
            try:
                found += self._pass(list(partial_room), chunk, partial_room)
            except PlanError as error:
                for each in partial_room:
                    self._give_up(each, error)
                full += partial_room
        if full:
            try:
                found += self._pass(full, chunk)
            except OpError:
                found += self._retry_each(full, chunk)
        return found

    def _retry_each(self, live: abc.Sequence[Sequence], chunk: int) -> list[CommittedTokens]:
        """Retry a pass that an op has refused, one sequence at a time: a sequence's tokens depend on no other.

        KV of a prompt that is not finite may come from another sequence of the same pass, so every such prompt is
        computed again, alone.
        """
        for each in [*live, *(other for other in self._open.values() if other.over)]:
            lost = self._prompt_damaged(each) or (each.over and not self.cache.is_finite(each.number))
            self._roll_back(each, each.shared if lost else each.computed)
        return [committed for each in live for committed in self._retry_alone(each, chunk)]

    def _retry_alone(self, sequence: Sequence, chunk: int) -> list[CommittedTokens]:
        """Retry a pass for one sequence; a prompt that starts over runs up to its first token.

        A sequence that is refused again loses its drafter, because a faulty draft must change no token. A sequence that
        is refused without one ends with the error.
        """
        anew = sequence.computed == sequence.shared
        rejects = sequence.engine_drafter is not None and sequence.engine_drafter.rejects
        while True:
            try:
                if rejects and sequence.rounds and not sequence.decoding:
                    self._pass([sequence], sequence.pending - 1)  # recomputes the features that the drafter reads
                prompted = not sequence.rounds
                committed = self._pass([sequence], chunk)
                if prompted and not self.cache.is_finite(sequence.number):
                    raise OpError("the KV of its prompt is not finite")
                if committed or not anew:
                    return committed
            except OpError as error:
                drafts = sequence.host_drafter is not None or sequence.engine_drafter is not None
                if sequence.disabled or not drafts:
                    self._roll_back(sequence, sequence.shared)
                    sequence.error = error
                    return [CommittedTokens(sequence, [], error=error)]
                self._roll_back(sequence, sequence.shared if self._prompt_damaged(sequence) else sequence.computed)
                _LOG.warning("sequence %d continues without its drafter: %s", sequence.id, error)
                self._adaptive.give_back(sequence.request, sequence.adaptive)
                sequence.disabled, sequence.adaptive = True, None

    def _prompt_damaged(self, sequence: Sequence) -> bool:
        """Whether a sequence without a generated token has KV that is not finite."""
        return not sequence.rounds and not self.cache.is_finite(sequence.number)

    def _rewind(self, sequence: Sequence, end: int) -> None:
        """A pass has failed: what it has fed the sequence, from token `end` on, is to be computed again."""
        sequence.unseen = 0
        self._truncate_caches(sequence, min(sequence.computed, end, len(sequence.tokens) - 1))

    def _roll_back(self, sequence: Sequence, end: int) -> None:
        """Rewind a sequence after a pass that an op has refused, and zero KV that is not finite in free slots.

        Engines that multiply masked values by 0 read those slots.
        """
        self._rewind(sequence, end)
        caches = [self.cache, *(drafter.cache for drafter in self.drafting.engine_drafters.values())]
        if self._partial is not None:
            caches.append(self._partial.cache)
            self._partial.cache_for(sequence).truncate(end)
        if end <= sequence.shared:
            self.drafting.truncate(sequence, end)
        if not sequence.disabled and not sequence.over:
            self._catch_up_drafters(sequence, fresh=False)
        for cache in caches:
            cache.erase(sequence.number)

    def _step_behind(self, sequences: abc.Sequence[Sequence], chunk: int) -> list[CommittedTokens]:
        """Commit a round that is outstanding, or is launched here, once the one after it is launched too."""
        rounds = self._launched
        present, following = rounds.outstanding, None
        try:
            if present is None:
                self.passes += 1
                present = rounds.launch(sequences, chunk)
                rounds.advance(present)
            going_on = [each for each in sequences if each.length < each.end]
            if rounds.serves(going_on):
                self.passes += 1
                following = rounds.launch(going_on, chunk)
                for each in present.placed:
                    each.overtaken = True
            rounds.collect(present)
            if following is not None:
                rounds.advance(following)
            rounds.outstanding = following
        except BaseException as error:
            rounds.outstanding = None
            rounds.settle()
            for failed in (present, following):
                for each in () if failed is None else failed.placed:
                    self._rewind(each.sequence, each.start)
            if isinstance(error, OpError):
                return self._retry_each(sequences, chunk)
            raise
        return self._commit_launch(present)

    def _commit_launch(self, launch: Launch) -> list[CommittedTokens]:
        """Commit the tokens of a launched round, whose KV was committed when it was launched."""
        found: list[CommittedTokens] = []
        for each in launch.placed:
            if each.root < 0:  # a part of its prompt was fed
                each.sequence.generation.stats.prefill_passes += 1
            elif not each.sequence.over:
                found.append(self._commit_tokens(each, self.programs[names.DECODE], 1, None))
        if not launch.alone and self.prefix_cache is not None and not self.prefix:
            self._insert_beginnings(launch.placed)
        return found

    def _switch(self, sequence: Sequence) -> None:
        """Adaptive speculation has disabled the sequence's drafters, or enabled them again."""
        assert sequence.adaptive is not None
        sequence.disabled = sequence.adaptive.disabled
        if not sequence.disabled:
            self._catch_up_drafters(sequence)

    def _give_up(self, sequence: Sequence, error: PlanError) -> None:
        """Let a sequence continue over the full cache after a pass over the partial one has failed."""
        assert self._partial is not None
        self._partial.disable(sequence, error)
        if sequence.ahead is not None and not sequence.disabled:
            self._catch_up_drafters(sequence)  # the drafter has missed what the failed pass replaced

    def _pass(
        self, live: abc.Sequence[Sequence], chunk: int, partial_room: Mapping[Sequence, int] | None = None
    ) -> list[CommittedTokens]:
        """Run a pass over the full cache, or over the partial one, where each may add `partial_room` tokens."""
        step, began, alone = self.target_step, perf_counter(), self.cache.alone
        partial = self._partial
        cache = self.cache if partial_room is None or partial is None else partial.cache
        confirming: dict[Sequence, Draft] = {}
        if alone:
            each = live[0]
            start, allowed = self._begin_pass(each, partial_room, confirming, chunk)
            cache.compact_if_worthwhile(
                1 + self._longest_draft
            )  # what neighbours have left must not keep a draft from being made
            draft = confirming[each] if confirming else self.drafting.propose_one(allowed, cache.length)
            drafted_at = perf_counter()
            placed = [lay_out_one(step, cache, each, start, chunk, draft)]
        else:
            starts: dict[Sequence, int] = {}
            limits: dict[int, DraftBudget] = {}
            for each in live:
                starts[each], limits[each.number] = self._begin_pass(each, partial_room, confirming, chunk)
            following = [each for each in self._live.values() if not each.disabled]
            nodes = step.max_nodes + 1 - len(live) - sum(map(len, confirming.values()))
            proposed = self.drafting.propose(limits, following, nodes)
            proposed |= {each.number: draft for each, draft in confirming.items()}
            drafted_at = perf_counter()
            with self._watch:
                placed = lay_out(step, cache, starts, proposed, chunk)
        if self._rejecting:
            self._lay_out_probs(placed)
        program = self._choose(placed, partial=partial_room is not None)
        self.passes += 1
        cut_at = self._run(program, placed)
        found = self._commit(placed, confirming, program, cache, partial_room, alone=alone)
        at_once = cut_at is None and isinstance(placed[0].draft, TreeInPlace)
        verified_at = None if at_once else cut_at or drafted_at
        note_round(placed, found, confirming, partial_room, began, drafted_at, verified_at, perf_counter())
        if partial is None:
            return found
        return [each for each in found if not each.tentative or each.sequence.request.tentative]

    def _begin_pass(
        self,
        sequence: Sequence,
        partial_room: Mapping[Sequence, int] | None,
        confirming: dict[Sequence, Draft],
        chunk: int,
    ) -> tuple[int, DraftBudget]:
        """The first token that the pass feeds, and what may be drafted after the tip.

        Tentative tokens that a pass over the full cache is to confirm are put into `confirming`.
        """
        if partial_room is None:
            if sequence.ahead is not None and sequence.tentative:
                assert self._partial is not None
                confirming[sequence] = self._partial.to_confirm(sequence)
                return sequence.computed, DraftBudget(sequence, 0)
            start, room = sequence.computed, sequence.end - len(sequence.tokens)
        else:
            assert self._partial is not None
            start, room = self._partial.begin_pass(sequence), partial_room[sequence]
        pending = len(sequence.tokens) - start
        if not sequence.drafting or pending > (chunk if partial_room is None else 1):
            return start, DraftBudget(sequence, 0)
        if self._rejecting and sequence.rounds == 0 and sequence.request.drafter in self._rejecting:
            return start, DraftBudget(
                sequence, 0
            )  # whether a prompt was computed, or its KV known, must not change tokens
        nodes, most = min(self.target_step.max_nodes, room - 1), sequence.request.limits.tokens
        return start, DraftBudget(sequence, nodes if most is None else min(nodes, most), pending == 1)

    def _choose(self, placed: abc.Sequence[Placement], *, partial: bool) -> Program:
        """The program of the step that is laid out."""
        drafted, tips = 0, False
        for each in placed:
            drafted += each.drafted
            tips |= each.root >= 0
        if not tips:
            return self.programs[names.PREFILL]
        name = names.VERIFY if drafted else names.DECODE
        if drafted and isinstance(tree := placed[0].draft, TreeInPlace):  # of a sequence that is alone
            name = tree.program
        return self.programs[names.partial(name) if partial else name]

    def _run(self, program: Program, placed: abc.Sequence[Placement]) -> float | None:
        """Run a pass. Before it verifies, cut a tree that was drafted in place to its request's limits, and to what is
        worth verifying; before it accepts, apply the rules of its sequences.

        Returns when the tree was cut, in seconds; None where none was. A device that records rounds launches draft and
        verification at once: there only limits cut.
        """
        first, limits = placed[0], placed[0].sequence.request.limits
        length = first.sequence.verify_length if self.target_step.buckets is None else None
        limited = limits.tokens is not None or limits.depth is not None
        cuts = isinstance(first.draft, TreeInPlace) and (limited or length is not None)
        ruled = [each for each in placed if each.sequence.rules and each.root >= 0] if program.halts else []
        if not cuts and not ruled:
            program.run()
            return None
        cut_at: float | None = None

        def cut() -> None:
            nonlocal cut_at
            cut_at = perf_counter()
            if limited:
                self._cut(first, lambda parent, scores: clip_draft(parent, scores, limits.tokens, limits.depth))
            if length is not None:
                drafted = first.drafted
                self._cut(first, lambda parent, scores: length.choose(parent, scores, first.fed))
                assert isinstance(first.draft, TreeInPlace)
                first.draft.left_out = drafted - first.drafted

        program.run(cut if cuts else None, (lambda: self._ruled_walk.run(ruled)) if ruled else None)
        return cut_at

    def _cut(self, placed: Placement, choose: Choose) -> None:
        engine = placed.sequence.engine_drafter
        assert engine is not None, "it has drafted in place"
        assert isinstance(placed.draft, TreeInPlace)
        engine.cut_in_place(self.target_step, placed.draft, choose)
        placed.drafted = self.target_step.drafted

    def _lay_out_probs(self, placed: abc.Sequence[Placement]) -> None:
        """Put the distributions that chains were drawn from where acceptance by rejection reads them."""
        for each in placed:
            draft = each.draft
            if isinstance(draft, Draft) and draft.probs is not None and each.drafted:
                probs = self.buffers.array(names.TARGET, names.DRAFT_PROBS)
                probs[each.first + 1 : each.first + 1 + each.drafted] = draft.probs[: each.drafted]
                self.buffers.send(names.TARGET, names.DRAFT_PROBS, (each.first + 1 + each.drafted) * probs.shape[1])

    def _commit(
        self,
        placed: abc.Sequence[Placement],
        confirming: Mapping[Sequence, Draft],
        program: Program,
        cache: KvCache,
        partial_room: Mapping[Sequence, int] | None,
        *,
        alone: bool,
    ) -> list[CommittedTokens]:
        """Commit what the pass has accepted: tokens to their sequences, KV to the caches; tell the drafters.

        A sequence alone commits the KV of the tokens that stay; of several, all accepted KV stays until `settle`
        releases the sequences that are over.
        """
        found: list[CommittedTokens] = []
        kept = program.kept
        if not alone and kept is not None:
            kept = kept[: int(self.buffers.array(names.TARGET, names.KEPT_COUNT)[0])].copy()
        for each in placed:
            sequence, taken, count = each.sequence, each.fed, 1
            if each.root >= 0 and program.counts is not None:
                count = int(program.counts[each.tree])
            if alone:
                each.kept = None if kept is None else kept[: each.fed + count - 1]
            else:
                each.kept = self._kept_of(sequence.number, kept, each.fed)
            if each.root >= 0:
                committed = self._commit_tokens(each, program, count, partial_room)
                found.append(committed)
                taken += max(1, len(committed.token_ids)) - 1
            else:  # a part of its prompt was fed
                sequence.generation.stats.prefill_passes += 1
            if alone:
                cache.commit_alone(taken, kept)
            if partial_room is None:
                sequence.computed = each.start + taken
            if sequence.host_drafter is not None or sequence.engine_drafter is not None:
                drafted = each.draft if each.drafted and sequence not in confirming else None
                self.drafting.commit(each, taken, drafted, self.passes)
        if not alone:
            with self._watch:
                cache.commit(kept)
            if self.prefix_cache is not None and not self.prefix:
                self._insert_beginnings(placed)
        if self._partial is not None:
            self._partial.note_step(placed, self.passes, over_partial=partial_room is not None)
        return found

    def _insert_beginnings(self, placed: abc.Sequence[Placement]) -> None:
        """Keep the KV of prompts, as others may begin alike; their drafters have taken them in by the second round."""
        assert self.prefix_cache is not None
        for each in placed:
            sequence = each.sequence
            if not (sequence.over or sequence.inserted) and sequence.rounds > 1:
                self.prefix_cache.keep(sequence)
                sequence.inserted = True

    def _kept_of(self, number: int, kept: NDArray[np.int64] | None, fed: int) -> NDArray[np.int64]:
        """A sequence's tokens of the step whose KV stays; without `kept`, its first `fed` ones."""
        branch = self.target_step.branch
        if kept is None:
            return np.flatnonzero(branch[: self.target_step.new_tokens] == number)[:fed]
        mine: NDArray[np.int64] = kept[branch[kept] == number]
        return mine

    def _commit_tokens(
        self,
        placed: Placement,
        program: Program,
        count: int,
        partial_room: Mapping[Sequence, int] | None,
    ) -> CommittedTokens:
        """Add the tokens that the target chose after one tip to the sequence, up to one that ends it."""
        sequence, tokens = placed.sequence, program.tokens
        assert tokens is not None, "a program of the target that commits tokens"
        request = sequence.request
        tentative = partial_room is not None and sequence.ahead is not None
        room = partial_room[sequence] if partial_room is not None else sequence.end - len(sequence.tokens)
        chosen: list[int]
        if count == 1:
            chosen = [int(tokens[placed.first])]
        else:
            chosen = tokens[placed.first : placed.first + min(count, room)].tolist()
        committed = CommittedTokens(sequence, [], drafted=placed.drafted, accepted=count - 1, tentative=tentative)
        if placed.draft is not None:
            sequence.generation.stats.left_out += placed.draft.left_out
        if tentative:
            assert sequence.ahead is not None
            if sequence.confirmed is None:
                sequence.confirmed = len(sequence.tokens)
            committed.token_ids = sequence.ahead.cut(chosen)
            sequence.tokens += committed.token_ids
            return committed
        if sequence.rules:
            chosen = self._by_rules(placed, program, chosen, committed)
        if chosen:
            committed.token_ids, committed.reason = sequence.generation.cut(chosen, len(chosen) == room)
        sequence.reason, sequence.error = committed.reason, committed.error
        ids = committed.token_ids
        sequence.chosen_by = placed
        host = sequence.host_drafter
        wanted = min(host.filler_top_k, self._geometry.vocab_size) if host is not None else 0
        if request.logprobs is not None or wanted:
            for index, token in enumerate(ids):
                logits = self.logits_of(sequence, index)
                if request.logprobs is not None:
                    raw = (placed.raw_logits or {}).get(_logits_index(placed, index), logits)
                    try:
                        committed.logprobs.append(logprobs(raw, token, request.logprobs))
                    except PlanError as error:  # infinite logits, from which a token can still be chosen
                        committed.error = sequence.error = OpError(str(error))
                        break
                if host is not None and wanted and not sequence.disabled:
                    likely = likeliest(logits, wanted)[::-1]
                    host.observe(len(sequence.tokens) + index, likely[logits[likely] > -np.inf])
        if request.on_round is not None:
            mine = np.zeros(0, np.int64) if placed.kept is None else placed.kept[placed.fed :]
            on_path = mine[: min(len(ids), count - 1)]
            trials = self.buffers.array(names.TARGET, names.TRIALS) if request.drafter in self._rejecting else None
            committed.round = read_round(
                self.target_step, placed.root, placed.first, placed.drafted, ids, on_path, placed.draft, trials
            )
        sequence.tokens += ids
        sequence.rounds += 1
        return committed

    def _by_rules(
        self, placed: Placement, program: Program, chosen: list[int], committed: CommittedTokens
    ) -> list[int]:
        """Return the tokens of a pass that the sequence's rules allow, up to where no token may follow: an error of
        this sequence alone."""
        try:
            if not program.halts:
                return [self._ruled_walk.choose_again(placed)]
        except RequestError as error:
            placed.stuck = 0, error
        if placed.stuck is None or placed.stuck[0] >= len(chosen):
            return chosen
        kept, reason = placed.stuck
        if kept:
            placed.sequence.stuck = reason
        else:
            committed.error = reason
        return chosen[:kept]

    # Logits.

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """Logits f32 `[stop - start, vocab]` of the last pass: a view until the next one."""
        rows: NDArray[np.float32] = self.buffers.rows(names.TARGET, names.LOGITS_OUT, start, stop)
        return rows

    def logits_of(self, sequence: Sequence, index: int) -> NDArray[np.float32]:
        """Logits f32 `[vocab]` that the `index`-th token of the sequence's last round was chosen by, its rules applied:
        a view."""
        at = 0  # its first pass has failed
        if sequence.chosen_by is not None:
            if sequence.chosen_by.overtaken:
                self._compute_again(sequence, sequence.chosen_by)
            at = _logits_index(sequence.chosen_by, index)
        logits: NDArray[np.float32] = self.logits(at, at + 1)[0]
        return logits

    # Passes of their own, of a sequence that is alone.

    def _feed(self, sequence: Sequence, stop: int, *, tip: bool) -> None:
        """Compute the KV of the sequence's tokens up to `stop`; with `tip`, the logits after the last of them too."""
        part = sequence.tokens[sequence.computed : stop]
        self.cache.begin_alone(part, sequence.computed, sequence.number)
        if tip:
            self.target_step.append_tip(len(part) - 1)
        self.passes += 1
        self.programs[names.PREFILL].run()
        self.cache.commit_alone(len(part), None)
        sequence.computed = stop
        self._loaded.files.check()

    def _compute_again(self, sequence: Sequence, chosen_by: Placement) -> None:
        """Compute the logits again that a launched round has overwritten."""
        self._launched.drop(sequence)
        chosen = chosen_by.start + chosen_by.fed  # the place of the token
        self._truncate_caches(sequence, min(sequence.computed, chosen - 1))
        self._feed(sequence, chosen, tip=True)
        chosen_by.first, chosen_by.overtaken, sequence.watched = 0, False, True

    def read(self, sequence: Sequence, request: Request, stats: Stats) -> NDArray[np.float32] | None:
        """Give all of the sequence's tokens KV; logits f32 `[1, vocab]` after them, None if it was cancelled."""
        chunk, tokens = self._geometry.prefill_chunk, sequence.tokens
        self._truncate_caches(sequence, min(sequence.computed, len(tokens) - 1))
        stats.prompt_tokens, stats.reused_tokens = len(tokens), sequence.computed
        while sequence.pending:
            if sequence.pending > chunk and request.cancelled:
                return None
            stop = min(sequence.computed + chunk, len(tokens))
            if stop < len(tokens):
                stats.prefill_passes += 1
            self._feed(sequence, stop, tip=stop == len(tokens))
        return self.logits(0, 1)

    def look_ahead(
        self, sequence: Sequence, tokens: list[int], distance: int, visible: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Logits of tokens that do not belong to the sequence; see `Session.look_ahead`."""
        past = sequence.computed + visible.shape[1] - len(tokens)
        self.target_step.begin_beams(past, sequence.computed + distance - 1, tokens, visible)
        self.buffers.send(names.TARGET, names.ATTN_BIAS, self.target_step.bias_elements)
        self.passes += 1
        self.programs[names.BEAM].run()
        self._loaded.files.check()
        return self.logits(0, len(tokens))

    def time_round(self, sequence: Sequence, chain: abc.Sequence[int], *, drafts: bool, partial: bool) -> float:
        """Milliseconds of the target's part of a round; see `Session.time_round`."""
        self._truncate_caches(sequence, min(sequence.computed, max(len(sequence.tokens) - 1, 0)))
        cache, start, room = self.cache, sequence.computed, self.cache.room(sequence.number)
        if partial:
            if self._partial is None:
                raise RequestError("The plan has no partial KV cache; build it with partial_kv.enabled.")
            row = self._partial.cache_for(sequence)
            cache, start, room = self._partial.cache, row.computed, row.room
        tokens = sequence.tokens
        most = min(self.target_step.max_nodes, self._geometry.context - len(tokens), room - 1)
        if len(tokens) - start != 1 or len(chain) > most:
            raise RequestError(
                f"The sequence has {len(tokens)} tokens, {start} of them with KV, and room for a chain of "
                f"{max(most, 0)}, but {len(chain)} are to follow; generate first, or pass fewer."
            )
        draft = Draft(chain, range(-1, len(chain) - 1))
        lay_out_one(self.target_step, cache, sequence, start, len(tokens), draft)
        name = names.VERIFY if drafts else names.DECODE
        began = perf_counter()
        self.passes += 1
        self.programs[names.partial(name) if partial else name].run()
        return 1000 * (perf_counter() - began)

    # What was committed, as text.

    def show(self, committed: CommittedTokens) -> Span:
        """The text of what was committed, pass by pass; may run beside the next step.

        A stop string in it ends the sequence (`Sequence.stopped`): what a pass has committed since is nothing.
        """
        sequence = committed.sequence
        if committed.error is not None:
            return Span([], "", sequence=sequence.id, error=committed.error)
        generation, text = sequence.generation, ""
        if committed.tentative:
            text = generation.preview(sequence.tentative) if sequence.request.tentative else ""
            return Span(committed.token_ids, text, tentative=True, sequence=sequence.id)
        token_ids, logprobs = committed.token_ids, committed.logprobs
        if token_ids:
            kept, text = generation.show(token_ids, committed.reason, committed.drafted, committed.accepted)
            if kept < len(token_ids):
                token_ids, logprobs = token_ids[:kept], logprobs[:kept]
            if committed.round is not None and sequence.request.on_round is not None:
                try:
                    with failing_alone("on_round"):
                        sequence.request.on_round(committed.round.cut(kept))
                except RequestError as error:
                    sequence.stopped = True
                    return Span([], "", sequence=sequence.id, error=error)
            generation.logprobs += logprobs
            own = generation.stats
            if own.rounds == 1:
                own.ttft_ms, own.first_span = (self.now() - sequence.began) * 1000, own.new_tokens
        else:
            generation.finish_reason = committed.reason
        if generation.finish_reason is None:
            return Span(token_ids, text, logprobs, sequence=sequence.id)
        sequence.stopped = True
        text += generation.finish()
        generation.stats.total_ms = (self.now() - sequence.began) * 1000
        result = generation.result()
        if sequence.request.remember and result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.drafting.remember(sequence, result.token_ids)
        return Span(token_ids, text, logprobs, sequence=sequence.id, result=result)


def _logits_index(placed: Placement, index: int) -> int:
    """Return the logits index that the `index`-th token of a round was chosen by."""
    node = 0 if placed.kept is None else int(placed.kept[placed.fed - 1 + index]) - placed.root
    return placed.first + node
