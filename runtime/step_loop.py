"""The step loop of one borrower: it opens sequences, generates them step by step, and shows what they get as text.

Every pass serves all sequences that it is given: it verifies the drafts of those that decode while it computes the
prompts of those that have just come. Each has the tokens that it would have alone, by its own seed, stream and limits.
A step itself is in `rounds/`.
"""

from __future__ import annotations

import logging
from collections import Counter, abc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import Manifest
from outrider.runtime.branch_request import Mode
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.execution.assembly import LoadedPlan
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.execution.warmup import warm_up
from outrider.runtime.generation import GrowingGeneration, Span
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.options.request import Request
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.prefix_cache.client import CacheClient
from outrider.runtime.rounds.alone import logits_of
from outrider.runtime.rounds.launched import LaunchedRounds
from outrider.runtime.rounds.parts import Parts
from outrider.runtime.rounds.retry import prompt_damaged, roll_back
from outrider.runtime.rounds.show import show
from outrider.runtime.rounds.step import step
from outrider.runtime.sampling import SamplingParams
from outrider.runtime.sequence import CommittedTokens, Sequence
from outrider.runtime.shared_prefix import SharedPrefix
from outrider.runtime.stats import StageClock, Stats
from outrider.runtime.text.stream import TextStream

_LOG = logging.getLogger("outrider")


class StepLoop:
    """Buffers, programs, KV caches and drafters for up to as many sequences as the plan has branches.

    Not safe under threads: its borrower drives it. `show` alone may run beside the next step.
    """

    def __init__(self, loaded: LoadedPlan, cache: PrefixCache | None = None, *, padded: bool = False) -> None:
        """`padded`: rows of a batch are laid out as a rectangle, for engines of the target that need one.

        With `cache`, sequences find what was computed of earlier ones. Raises `PlanError` where the plan's programs
        cannot be resolved.
        """
        self.parts = parts = Parts(loaded, cache, padded=padded)
        self.manifest: Manifest = loaded.manifest
        self._loaded, self._geometry = loaded, loaded.manifest.target
        self.buffers: Buffers = parts.buffers
        self.target_step: TargetStep = parts.step
        self.programs: dict[str, Program] = parts.programs
        self.cache: KvCache = parts.cache
        self.drafting: Drafting = parts.drafting
        self.shared = SharedPrefix(parts)
        self._free: list[int] = []
        self._live, self._open = parts.live, parts.open
        self._launched = LaunchedRounds(parts)
        self.begin()
        exchange = parts.buffers.exchange
        if exchange is not None:  # before the programs, whose engines a launched round may still run
            finalize(self, exchange.wait_for_launches).atexit = False
        self.records = exchange is not None and exchange.records and bool(loaded.plan.buckets)
        if self.records:
            self._record()

    def _record(self) -> None:
        """Run every size of round once, so that the device has recorded it before the first prompt."""
        exchange, started = self.buffers.exchange, perf_counter()
        assert exchange is not None
        self.buffers.set_sampling(0, SamplingParams())
        steps = {names.TARGET: self.target_step, **self.parts.draft_steps}
        with exchange.recording():
            rounds = warm_up(self._geometry.context, steps, self.drafting, self.programs)
        _LOG.info("warmed up %d rounds in %.1f s", rounds, perf_counter() - started)

    @property
    def prefix_cache(self) -> CacheClient | None:
        return self.parts.prefix_cache

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

        Returns whether the KV of the prefix is here: else `shared.compute` gives it.
        """
        self._launched.outstanding = None
        prefix, pooled = list(prefix), mode == "in-one-sequence"
        here = self.shared.begin(prefix, owner, mode) and self.drafting.has_prefix(prefix, set(drafters))
        if here:
            self.cache.rewind()
        else:
            self.cache.arrange(pooled=pooled)
            self.shared.computed = 0
        self.drafting.begin(prefix, set(drafters), pooled=pooled, here=here)
        self._free = list(range(self._geometry.branches - 1, -1, -1))
        for number in self._free:
            self._set_greedy(number)
        self._live.clear()
        self._open.clear()
        self.parts.chosen_by.clear()
        if self.parts.partial is not None:
            self.parts.partial.arrange(pooled=pooled)
        if self.prefix_cache is not None:
            self.prefix_cache.forget()
        self.parts.paused = 0.0
        return here

    @property
    def sequences(self) -> abc.Sequence[Sequence]:
        """Open sequences: those that have KV here."""
        return list(self._open.values())

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """The caller has a span meanwhile: its time is not the loop's."""
        began = perf_counter()
        try:
            yield
        finally:
            self.parts.paused += perf_counter() - began

    @contextmanager
    def counting(self, stats: Stats) -> Iterator[None]:
        """Measure what runs meanwhile; `stats` is filled at the end."""
        clock = self.stage_clock()
        self.parts.watch.ms = 0.0
        try:
            yield
        finally:
            clock.fill(stats)
            caches = self.parts.caches
            stats.state_ms = self.parts.watch.ms
            stats.bytes_copied = sum(cache.bytes_copied for cache in caches)
            stats.kv_operations = dict(sum((cache.operations for cache in caches), Counter()))
            stats.compactions = sum(cache.compactions for cache in caches)
            stats.kv_bytes = sum(cache.peak_slots * cache.slot_bytes for cache in caches)

    def stage_clock(self) -> StageClock:
        """Times of all stages from now on."""
        return StageClock([*self.programs.values(), *self.drafting.host_times.values(), self.parts.ruled_walk])

    def warm_up(self, mode: Mode) -> None:
        """Run a pass of as many sequences as there can be, so that no later one waits for memory to be handed out."""
        kept, self.parts.prefix_cache = self.prefix_cache, None
        self.begin(mode=mode)
        running = [self.admit(number, [0], Request(1)) for number in range(self._geometry.branches)]
        for committed in self.step(running):
            self.show(committed)
        self.settle(running)
        self.parts.prefix_cache = kept

    # Sequences.

    def fits(self, tokens: int, request: Request) -> bool:
        """Whether there is room for one more sequence of `tokens` tokens after the prefix, however long the others get.

        Capacity is reserved: where a sequence ends never depends on its neighbours. Drafts take what is left, but for
        those by rejection, which tokens depend on.
        """
        shared = len(self.parts.prefix)
        ends = [(self._end(shared + tokens, request), request)]
        ends += [(each.generation.end, each.generation.request) for each in self._open.values()]
        own = [end - shared + self._reserved(each) for end, each in ends]
        return bool(self._free) and self.cache.holds(own, self._geometry.prefill_chunk)

    def _reserved(self, request: Request) -> int:
        """Slots for the drafts of a request in the row that all share."""
        return self.parts.rejecting.get(request.drafter or "", 0) if self.cache.pooled else 0

    def _end(self, tokens: int, request: Request) -> int:
        return min(self._geometry.context, tokens + request.max_new_tokens)

    def open(self, tokens: abc.Sequence[int] = (), *, number: int | None = None, id: int = 0) -> Sequence:
        """A sequence of `tokens` after the prefix; it gets `number`, one that is free, or the lowest."""
        number = self._free[-1] if number is None else number
        self._free.remove(number)
        shared = len(self.parts.prefix)
        sequence = Sequence(id, number, [*self.parts.prefix, *tokens], shared=shared, computed=shared)
        self._open[number] = sequence
        self.cache.open(number)
        self.drafting.open(sequence)
        if self.parts.partial is not None:
            self.parts.partial.cache_for(sequence).reset()
        return sequence

    def admit(self, id: int, tokens: abc.Sequence[int], request: Request) -> Sequence:
        """Open a sequence that fits, and begin its generation; its spans carry `id`."""
        number = None
        if (shared := self.parts.sharing) is not None:
            number = shared.number_for(tokens, request.cache_salt, self._free)
        sequence = self.open(tokens, number=number, id=id)
        text = TextStream(self._loaded.tokenizer, sequence.tokens, request.stop)
        self.start(sequence, request, text)
        return sequence

    def start(self, sequence: Sequence, request: Request, text: TextStream) -> None:
        """Generate after the sequence's tokens from now on; what it is generated for ends with `finish`.

        Tokens that the request has given before follow those at once.
        """
        tokens = sequence.tokens
        if request.rules and not self.parts.halts:
            request = replace(request, drafter=None, partial_kv="off")
        given = len(request.generated)
        stats = Stats(prompt_tokens=len(tokens), resumed_tokens=given, partial_mode=request.partial_kv)
        rules = [rule.begin(tokens) for rule in request.rules]
        end = self._end(len(tokens), request)
        sequence.generation = GrowingGeneration(request, text, stats, rules, end, self.parts.now())
        sequence.unseen = 0
        self.parts.chosen_by.pop(sequence.number, None)
        tokens += request.generated
        self.buffers.set_sampling(sequence.number, request.sampling)
        self.buffers.arrays[names.BY_REJECTION][sequence.number] = request.drafter in self.parts.rejecting
        sequence.computed = min(sequence.computed, len(tokens) - 1)
        self.parts.truncate(sequence, sequence.computed)
        drafters = self.drafting.attach(sequence)
        if (shared := self.parts.sharing) is not None:
            stats.cached_tokens = shared.recall(sequence)
        drafters.adaptive = self.parts.adaptive.take(request)
        drafters.disabled = drafters.adaptive is not None and drafters.adaptive.disabled
        if not drafters.disabled:
            self.parts.catch_up_drafters(sequence)
        stats.reused_tokens = sequence.computed
        if shared is not None:
            shared.note_reused(stats.reused_tokens)
        self._live[sequence.number] = sequence
        if self.parts.partial is not None:
            self.parts.partial.begin(sequence)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence."""
        self._launched.drop(sequence)
        chosen_by = self.parts.chosen_by.get(sequence.number)
        if chosen_by is not None and length < chosen_by.start + chosen_by.fed:
            del self.parts.chosen_by[sequence.number]
        del sequence.tokens[length:]
        self.parts.truncate(sequence, min(length, sequence.computed))
        if self.parts.partial is not None:
            self.parts.partial.cache_for(sequence).truncate(length)
        self.drafting.truncate(sequence, length)

    def finish(self, sequence: Sequence, *, wait: bool = True) -> None:
        """End the generation; the sequence keeps its tokens and their KV.

        Without `wait`, the prefix cache takes them only where no other thread is at it.
        """
        if self._live.pop(sequence.number, None) is None:
            return
        self._launched.drop(sequence)
        if prompt_damaged(self.parts, sequence):  # cancelled before its first token
            roll_back(self.parts, sequence, sequence.shared)
        if sequence.computed > len(sequence.tokens):
            self.parts.truncate(sequence, len(sequence.tokens))
        if self.parts.partial is not None:
            self.parts.partial.finish(sequence)
        drafters = self.drafting.drafters_of(sequence)
        self.parts.adaptive.give_back(sequence.generation.request, drafters.adaptive)
        if (shared := self.parts.sharing) is not None:
            if drafters.engine is not None and not drafters.disabled and self.cache.alone:
                drafters.engine.sync(sequence)  # what the last pass has left
            shared.keep(sequence, wait=wait)

    def release(self, sequence: Sequence) -> None:
        """Close a sequence; its slots and its number can be used again."""
        self.finish(sequence)
        if (shared := self.parts.sharing) is not None:
            shared.leave(sequence)
        del self._open[sequence.number]
        self._set_greedy(sequence.number)
        self._free.append(sequence.number)
        self._free.sort(reverse=True)
        self.cache.close(sequence.number)
        self.drafting.close(sequence)
        self.parts.chosen_by.pop(sequence.number, None)

    def _set_greedy(self, number: int) -> None:
        """Reset an unused number's sampling to greedy: drafters compute noise for those that sample."""
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
        that all decode plainly are launched a step ahead (`LaunchedRounds`).

        Raises PlanError where the plan was written over, before anybody hears of the pass.
        """
        found = step(self.parts, self._launched, sequences, chunk or self._geometry.prefill_chunk)
        self._loaded.files.check()
        return found

    def show(self, committed: CommittedTokens) -> Span:
        """The text of what was committed, pass by pass; may run beside the next step.

        A stop string in it ends the generation (`GrowingGeneration.stopped`): what a pass has committed since is
        nothing.
        """
        return show(self.parts, committed)

    def logits_of(self, sequence: Sequence, index: int) -> NDArray[np.float32]:
        """Logits f32 `[vocab]` that the `index`-th token of the sequence's last round was chosen by, its rules applied:
        a view."""
        chosen_by = self.parts.chosen_by.get(sequence.number)
        if chosen_by is not None and chosen_by.overtaken:
            self._launched.drop(sequence)
        return logits_of(self.parts, sequence, index)
