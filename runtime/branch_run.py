"""Many branches behind one prefix, decoded together.

Every pass serves all live branches: it verifies the drafts of those that decode while it computes the beginnings of
those that have just come. Each has the tokens that it would have alone, by its own seed, stream and limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import RequestError
from plans.manifest import GraphDrafter
from runtime.branch_request import BranchRequest, Mode
from runtime.branch_stream import BranchSpan, BranchStats
from runtime.drafters.branch_drafting import Asking, BranchDrafting
from runtime.drafters.branches import EngineBranches
from runtime.execution.assembly import Loaded, assemble
from runtime.generation import FinishReason, Generation, GrowingGeneration, Span
from runtime.kv.branch_arena import BranchArena
from runtime.kv.branches import Branch, BranchState
from runtime.prefix_cache.branch_memory import BranchMemory
from runtime.prefix_cache.cache import PrefixCache
from runtime.request import Options, check_options
from runtime.sampling import TokenLogprob, likeliest, logprobs
from runtime.stats import StageClock, Stats, Stopwatch
from runtime.text.stream import TextStream


@dataclass(eq=False)
class Running:
    """A live branch, and what stands behind it."""

    place: int
    asked: BranchRequest
    asking: Asking
    generation: GrowingGeneration
    began: float
    rounds: int = 0  # passes that have committed something
    kept: bool = False  # whether the prefix cache has its beginning
    reason: FinishReason | None = None  # why its tokens end
    stopped: bool = False  # whether its text has ended
    error: RequestError | None = None  # why it cannot go on

    @property
    def over(self) -> bool:
        return self.stopped or self.reason is not None or self.error is not None

    @property
    def branch(self) -> Branch:
        return self.asking.branch

    @property
    def decoding(self) -> bool:
        """Whether its beginning has been computed."""
        return len(self.branch.pending) == 1


@dataclass
class Committed:
    """What a pass has committed of a branch, whose text has not been looked at yet."""

    running: Running
    token_ids: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    reason: FinishReason | None = None
    error: RequestError | None = None


class BranchRunner:
    """Buffers for branches in one of the two modes. One run at a time."""

    def __init__(self, loaded: Loaded, mode: Mode, *, padded: bool = False, cache: PrefixCache | None = None) -> None:
        """`padded`: rows of a batch are laid out as a rectangle, for engines of the target that need one.

        With `cache`, prefixes, and branches behind none, find what was computed of earlier ones.
        """
        manifest = loaded.manifest
        self._tokenizer, self._geometry = loaded.tokenizer, manifest.target
        parts = assemble(loaded)
        self._buffers, self._step, programs = parts.buffers, parts.step, parts.programs
        self._prefill, self._verify = programs[names.PREFILL], programs[names.VERIFY]
        rows = self._geometry.branches if mode == "batching" else 1
        compact = programs[names.compact(names.TARGET)]
        self._arena = BranchArena(names.TARGET, self._buffers, self._step, compact, rows, padded=padded)
        self._state = BranchState(self._arena, self._step, self._geometry.branches)
        self._watch = Stopwatch()  # of the bookkeeping of slots, all models
        with_engines = {
            drafter.name: EngineBranches(
                drafter,
                manifest.models[drafter.name],
                self._buffers,
                parts.draft_steps[drafter.name],
                programs[names.extend(drafter.name)],
                programs[names.draft(drafter.name)],
                programs[names.compact(drafter.name)],
                rows,
                self._watch,
            )
            for drafter in manifest.drafters
            if isinstance(drafter, GraphDrafter)
        }
        self._programs = list(programs.values())
        self._drafting = BranchDrafting(manifest.drafters, with_engines, self._step.max_nodes + 1)
        self._memory = None if cache is None else BranchMemory(cache, self._arena, with_engines)
        self._paused = 0.0  # seconds that the caller had
        self._kept_count = self._buffers.of(names.TARGET, names.KEPT_COUNT)

    def warm_up(self) -> None:
        """Run a pass of as many branches as there can be, so that no later one waits for memory to be handed out."""
        memory, self._memory = self._memory, None
        request = check_options(Options(max_new_tokens=1, drafter="none", ignore_eos=True), [], ())
        self.begin([], set())
        running = [self.admit(place, BranchRequest([0], request, 1)) for place in range(self._geometry.branches)]
        for _ in self.round(running, BranchStats()):
            pass
        self._memory = memory

    def run(
        self,
        prefix: Sequence[int],
        asked: Sequence[BranchRequest],
        max_parallel: int,
        stats: BranchStats,
        keep_for: Collection[str | None] = (),
    ) -> Generator[BranchSpan, None, None]:
        """Spans as they are committed, of all branches; at most `max_parallel` live at once, and `stats` filled.

        Those that are predicted to be the longest begin first, of equal ones in the order given. The rows of the prefix
        stay for a next run behind the same one, if its drafters are among those of this run and `keep_for`.
        """
        with self.counting(stats):
            yield from self._run(prefix, asked, max_parallel, stats, set(keep_for))

    @contextmanager
    def counting(self, stats: BranchStats) -> Iterator[None]:
        """What runs meanwhile cost, at the end in `stats`."""
        clock = StageClock(self._programs)
        self._watch.ms = 0.0
        try:
            yield
        finally:
            clock.fill(stats)
            arenas = [self._arena, *self._drafting.arenas]
            stats.state_ms = self._watch.ms
            stats.bytes_copied = sum(arena.bytes_copied for arena in arenas)
            stats.compactions = sum(arena.compactions for arena in arenas)
            stats.kv_bytes = sum(arena.peak_slots * arena.slot_bytes for arena in arenas)

    def _run(
        self,
        prefix: Sequence[int],
        asked: Sequence[BranchRequest],
        max_parallel: int,
        stats: BranchStats,
        keep_for: set[str | None],
    ) -> Generator[BranchSpan, None, None]:
        if self.begin(prefix, {each.request.drafter for each in asked} | keep_for):
            stats.reused_tokens = len(prefix)
        elif self._memory is not None:
            stats.reused_tokens = stats.cached_tokens = self._memory.recall_prefix(prefix, self._drafting.active)
            self._state.restore_prefix(stats.reused_tokens)
        computed = stats.reused_tokens
        while rows := self._state.prepare_prefix(self._geometry.prefill_chunk):
            if all(each.request.cancelled for each in asked):
                break
            self._prefill.run()
            stats.prefill_passes += 1
            self._drafting.follow_prefix(self._state.commit_prefix(rows), rows)
            computed += rows
        if self._memory is not None and prefix and computed == len(prefix):
            self._memory.keep_prefix(prefix, self._drafting.active)
        waiting = deque(sorted(enumerate(asked), key=lambda each: -each[1].predicted_tokens))
        running: list[Running] = []
        while waiting or running:
            for place, each in [(place, each) for place, each in waiting if each.request.cancelled]:
                waiting.remove((place, each))
                untouched = Stats(prompt_tokens=len(prefix) + len(each.token_ids))
                yield BranchSpan(place, Span([], ""), Generation("", [], FinishReason.CANCELLED, untouched))
            while waiting and len(running) < max_parallel and (not running or self.fits(waiting[0][1])):
                running.append(self.admit(*waiting.popleft()))
            for span in self.round(running, stats) if running else ():
                if span.error is not None:
                    raise RequestError(f"Branch {span.branch}: {span.error}") from None
                handed_over = perf_counter()
                yield span
                self._paused += perf_counter() - handed_over  # the caller's time is not ours

    def begin(self, prefix: Sequence[int], drafters: set[str | None]) -> bool:
        """Forget all branches; those to come stand behind `prefix` and ask these drafters.

        Returns whether the prefix's rows are there: else `run` computes them.
        """
        there = self._state.has_prefix(prefix) and self._drafting.has_prefix(prefix, drafters)
        if there:
            self._state.rewind()
        else:
            self._drafting.reset()
            self._state.init_prefix(prefix)
        self._drafting.begin(prefix, drafters)
        if self._memory is not None:
            self._memory.forget()
        self._paused = 0.0
        return there

    @property
    def _own_memory(self) -> BranchMemory | None:
        """Where branches' own rows are kept: behind a prefix they are not."""
        return None if self._state.prefix else self._memory

    def _end(self, asked: BranchRequest) -> int:
        """Most tokens that the branch may have of its own: those that it would have alone."""
        room = self._geometry.context - len(self._state.prefix)
        return min(room, len(asked.token_ids) + asked.request.max_new_tokens)

    def fits(self, asked: BranchRequest) -> bool:
        """Whether there is room for one more branch, whatever the others come to."""
        return self._state.fits(self._end(asked), self._geometry.prefill_chunk)

    def admit(self, place: int, asked: BranchRequest) -> Running:
        """A branch that fits begins; what it says is told by `place`."""
        began, memory = self._now(), self._own_memory
        number = None if memory is None else memory.number_for(asked.token_ids, self._state.free)
        branch = self._state.add_branch(asked.token_ids, self._end(asked), number)
        self._buffers.set_sampling(branch.number, asked.request.sampling)
        asking = self._drafting.add(branch, asked.request.drafter)
        text = TextStream(self._tokenizer, asking.tokens, asked.request.stop)
        stats = Stats(prompt_tokens=len(asking.tokens), reused_tokens=len(self._state.prefix))
        if memory is not None:
            stats.reused_tokens, stats.cached_tokens = memory.recall(asking)
        generation = GrowingGeneration(asked.request, text, stats)
        return Running(place, asked, asking, generation, began)

    def _now(self) -> float:
        """Seconds of the run's own time."""
        return perf_counter() - self._paused

    def round(self, running: list[Running], stats: BranchStats) -> Generator[BranchSpan, None, None]:
        """One pass over all that is pending, and what it has brought; who is over is `running` no more."""
        for each in self.advance(running, stats):
            span = self.show(each)
            stats.new_tokens += len(span.span.token_ids)
            yield span
        self.settle(running)

    def advance(self, running: list[Running], stats: BranchStats, chunk: int | None = None) -> list[Committed]:
        """One pass over all that is pending: what it commits of each branch, as far as tokens tell, for `show`.

        At most `chunk` tokens of beginnings go in (default: as many as a pass takes). Those who are over are let go
        before the pass; those who come to be over by it, at the next one, or by `settle`.
        """
        stats.most_alive = max(stats.most_alive, len(running))
        found = []
        for each in running:
            if each.asked.request.cancelled and not each.over:
                each.reason = FinishReason.CANCELLED
                found.append(Committed(each, [], reason=each.reason))
        self.settle(running)
        if running:
            found += self._pass(running, chunk or self._geometry.prefill_chunk)
            stats.rounds += 1
        return found

    def _pass(self, live: Sequence[Running], chunk: int) -> list[Committed]:
        by_number = {each.branch.number: each for each in live}
        drafts = self._drafting.draft([(each.asking, _left(each.branch) - 1) for each in live])
        with self._watch:
            laid_out = self._state.prepare_inputs(drafts, chunk)
        self._verify.run()
        kept = self._buffers.of(names.TARGET, names.KEPT_ROWS)[: int(self._kept_count[0])].copy()
        tokens, counts = self._verify.tokens, self._verify.counts
        assert tokens is not None
        assert counts is not None
        rows: list[tuple[Branch, int]] = []
        found: list[Committed] = []
        tree = first = 0  # the next tree, and its root among the logits
        owner = self._step.branch[kept]
        for branch, drafted in laid_out:
            each, mine = by_number[branch.number], kept[owner == branch.number]
            taken = len(mine)
            if branch.root >= 0:  # else only a part of its beginning was fed
                count, room = int(counts[tree]), _left(branch)
                chosen = tokens[first : first + min(count, room)].tolist()
                if each.asked.request.constraint is not None:
                    chosen = self._choose(each, first)
                committed = Committed(each, [], drafted=drafted, accepted=count - 1, error=each.error)
                if chosen:
                    committed.token_ids, each.reason = each.generation.cut(chosen, len(chosen) == room)
                    committed.reason = each.reason
                    self._note(committed, mine, first)
                each.rounds += 1
                taken = len(branch.pending) + max(1, len(committed.token_ids)) - 1
                branch.tokens += committed.token_ids
                each.asking.tokens += committed.token_ids
                found.append(committed)
                tree, first = tree + 1, first + 1 + drafted
            self._drafting.follow(each.asking, branch.rows, mine[:taken])
            rows.append((branch, taken))
        with self._watch:
            self._state.commit(rows, kept)
        memory = self._own_memory
        for each in live:
            if memory is not None and not (each.over or each.kept) and each.rounds > 1:
                memory.keep(each.asking)  # others may begin alike; its drafter has taken in the beginning by now
                each.kept = True
        return found

    def _choose(self, each: Running, first: int) -> list[int]:
        """The token that a branch's form lets it go on with; none where it cannot, which is its error alone."""
        constraint, branch = each.asked.request.constraint, each.branch
        assert constraint is not None
        logits = self._buffers.rows(names.TARGET, names.LOGITS_OUT, first, first + 1)[0]
        try:
            token = constraint.choose(logits, int(self._step.positions[branch.root]), each.asked.request.sampling)
            constraint.advance(token)
        except RequestError as error:
            each.error = error
            return []
        return [token]

    def _note(self, committed: Committed, mine: NDArray[np.int64], first: int) -> None:
        """Log-probabilities, and what the drafter wants to see."""
        each = committed.running
        request, branch, drafter = each.asked.request, each.branch, each.asking.host
        wanted = min(drafter.filler_top_k, self._geometry.vocab_size) if drafter is not None else 0
        if request.logprobs is None and not wanted:
            return
        path = mine[len(branch.pending) - 1 :] - branch.root  # the tip is node 0
        for index, token in enumerate(committed.token_ids):
            row = first + int(path[index])
            logits = self._buffers.rows(names.TARGET, names.LOGITS_OUT, row, row + 1)[0]
            if request.logprobs is not None:
                committed.logprobs.append(logprobs(logits, token, request.logprobs))
            if drafter is not None and wanted:
                drafter.observe(len(each.asking.tokens) + index, likeliest(logits, wanted)[::-1])

    def settle(self, running: list[Running]) -> None:
        """Let go of those who are over, their numbers and rows; they are `running` no more."""
        memory = self._own_memory
        over = [each for each in running if each.over]  # once: texts may end meanwhile
        for each in over:
            if memory is not None:
                memory.keep(each.asking)
                memory.leave(each.asking)
            self._state.finish(each.branch)
            self._drafting.finish(each.asking)
            running.remove(each)

    def show(self, committed: Committed) -> BranchSpan:
        """The text of what was committed, pass by pass; may run beside the next pass.

        A stop string in it ends the branch (`Running.stopped`): what a pass has committed since is nothing.
        """
        each = committed.running
        if committed.error is not None:
            return BranchSpan(each.place, Span([], ""), error=committed.error)
        generation, span = each.generation, Span([], "")
        if committed.token_ids:
            span = generation.show(committed.token_ids, committed.reason, committed.drafted, committed.accepted)
            span.logprobs.extend(committed.logprobs[: len(span.token_ids)])
            generation.logprobs += span.logprobs
            own = generation.stats
            if own.rounds == 1:
                own.ttft_ms, own.first_span = (self._now() - each.began) * 1000, own.new_tokens
        else:
            generation.finish_reason = committed.reason
        if generation.finish_reason is None:
            return BranchSpan(each.place, span)
        each.stopped = True
        rest = generation.finish()
        generation.stats.total_ms = (self._now() - each.began) * 1000
        span = Span(span.token_ids, span.text + rest.text, span.logprobs)
        return BranchSpan(each.place, span, generation.result())


def _left(branch: Branch) -> int:
    """Tokens that it may still come to have."""
    return branch.end - len(branch.tokens)
