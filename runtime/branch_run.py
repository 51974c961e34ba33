"""Many branches behind one prefix, decoded together.

Every pass serves all live branches: it verifies the drafts of those that decode while it computes the beginnings of
those that have just come. Each has the tokens that it would have alone, by its own seed, stream and limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import RequestError
from plans.manifest import GraphDrafter
from runtime.assembly import Loaded, assemble
from runtime.branch_arena import BranchArena
from runtime.branch_drafting import Asking, BranchDrafting
from runtime.branch_memory import BranchMemory
from runtime.branch_request import BranchRequest, Mode
from runtime.branch_stream import BranchSpan, BranchStats
from runtime.branches import Branch, BranchState
from runtime.drafters.branches import EngineBranches
from runtime.generation import FinishReason, GrowingGeneration, Span
from runtime.prefix_cache import PrefixCache
from runtime.request import Options, check_options
from runtime.sampling import likeliest, logprobs
from runtime.stats import StageClock, Stats, Stopwatch
from runtime.text_stream import TextStream


@dataclass
class Running:
    """A live branch, and what stands behind it."""

    place: int
    asked: BranchRequest
    asking: Asking
    generation: GrowingGeneration
    began: float
    kept: bool = False  # whether the prefix cache has its beginning
    error: RequestError | None = None  # why it cannot go on

    @property
    def over(self) -> bool:
        return self.error is not None or self.generation.finish_reason is not None

    @property
    def branch(self) -> Branch:
        return self.asking.branch


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
        self._watch = Stopwatch()  # of the books of slots, all models
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

    def rehearse(self) -> None:
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
            if all(map(_cancelled, asked)):
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
            while waiting and len(running) < max_parallel and (not running or self.fits(waiting[0][1])):
                running.append(self.admit(*waiting.popleft()))
            for span in self.round(running, stats):
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

    def round(
        self, running: list[Running], stats: BranchStats, chunk: int | None = None
    ) -> Generator[BranchSpan, None, None]:
        """One pass over all that is pending, and what it has brought; who is over is `running` no more.

        At most `chunk` tokens of beginnings go in (default: as many as a pass takes).
        """
        stats.most_alive = max(stats.most_alive, len(running))
        try:
            for span in self._round(running, stats, chunk or self._geometry.prefill_chunk):
                stats.new_tokens += len(span.span.token_ids)
                yield span
        finally:
            running[:] = [each for each in running if not each.over]

    def _round(self, running: Sequence[Running], stats: BranchStats, chunk: int) -> Generator[BranchSpan, None, None]:
        for each in running:
            if _cancelled(each.asked):
                each.generation.finish_reason = FinishReason.CANCELLED
                yield self._finish(each, Span([], ""))
        by_number = {each.branch.number: each for each in running if each.generation.finish_reason is None}
        if not by_number:
            return
        live = list(by_number.values())
        drafts = self._drafting.draft([(each.asking, _left(each.branch) - 1) for each in live])
        with self._watch:
            laid_out = self._state.prepare_inputs(drafts, chunk)
        self._verify.run()
        stats.rounds += 1
        kept = self._buffers.of(names.TARGET, names.KEPT_ROWS)[: int(self._kept_count[0])].copy()
        tokens, counts = self._verify.tokens, self._verify.counts
        assert tokens is not None
        assert counts is not None
        rows: list[tuple[Branch, int]] = []
        spans: list[tuple[Running, Span]] = []
        tree = first = 0  # the next tree, and its root among the logits
        owner = self._step.branch[kept]
        for branch, drafted in laid_out:
            each, mine = by_number[branch.number], kept[owner == branch.number]
            taken = len(mine)
            if branch.root >= 0:  # else only a part of its beginning was fed
                count, room = int(counts[tree]), _left(branch)
                chosen = tokens[first : first + min(count, room)].tolist()
                if (constraint := each.asked.request.constraint) is not None:
                    logits = self._buffers.rows(names.TARGET, names.LOGITS_OUT, first, first + 1)[0]
                    position = int(self._step.positions[branch.root])
                    try:
                        chosen = [constraint.choose(logits, position, each.asked.request.sampling)]
                        constraint.advance(chosen[0])
                    except RequestError as error:  # of this branch alone
                        each.error, chosen = error, []
                span, stay = Span([], ""), 1
                if each.error is None:
                    span, stay = each.generation.take(chosen, drafted, count - 1, len(chosen) == room)
                    self._note(each, span, mine, first)
                own = each.generation.stats
                if own.rounds == 1:
                    own.ttft_ms, own.first_span = (self._now() - each.began) * 1000, own.new_tokens
                taken = len(branch.pending) + stay - 1
                branch.tokens += span.token_ids
                each.asking.tokens += span.token_ids
                spans.append((each, span))
                tree, first = tree + 1, first + 1 + drafted
            self._drafting.follow(each.asking, branch.rows, mine[:taken])
            rows.append((branch, taken))
        with self._watch:
            self._state.commit(rows, kept)
        for each, span in spans:
            over = each.over
            memory = self._own_memory
            if memory is not None and not (over or each.kept) and each.generation.stats.rounds > 1:
                memory.keep(each.asking)  # others may begin alike; its drafter has taken in the beginning by now
                each.kept = True
            yield self._finish(each, span) if over else BranchSpan(each.place, span)

    def _note(self, each: Running, span: Span, mine: NDArray[np.int64], first: int) -> None:
        """Log-probabilities, and what the drafter wants to see."""
        request, branch, drafter = each.asked.request, each.branch, each.asking.host
        wanted = min(drafter.filler_top_k, self._geometry.vocab_size) if drafter is not None else 0
        if request.logprobs is None and not wanted:
            return
        path = mine[len(branch.pending) - 1 :] - branch.root  # the tip is node 0
        for index, token in enumerate(span.token_ids):
            row = first + int(path[index])
            logits = self._buffers.rows(names.TARGET, names.LOGITS_OUT, row, row + 1)[0]
            if request.logprobs is not None:
                span.logprobs.append(logprobs(logits, token, request.logprobs))
            if drafter is not None and wanted:
                drafter.observe(len(each.asking.tokens) + index, likeliest(logits, wanted)[::-1])
        each.generation.logprobs += span.logprobs

    def _finish(self, each: Running, last: Span) -> BranchSpan:
        memory = self._own_memory
        if memory is not None:
            memory.keep(each.asking)
            memory.leave(each.asking)
        self._state.finish(each.branch)
        self._drafting.finish(each.asking)
        if each.error is not None:
            return BranchSpan(each.place, last, error=each.error)
        rest = each.generation.finish()
        each.generation.stats.total_ms = (self._now() - each.began) * 1000
        span = Span(last.token_ids, last.text + rest.text, last.logprobs)
        return BranchSpan(each.place, span, each.generation.result())


def _cancelled(asked: BranchRequest) -> bool:
    cancel = asked.request.cancel
    return cancel is not None and cancel.is_set()


def _left(branch: Branch) -> int:
    """Tokens that it may still come to have."""
    return branch.end - len(branch.tokens)
