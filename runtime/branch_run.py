"""Many branches behind one prefix, decoded together in one sequence.

Every pass serves all live branches: it verifies the drafts of those that decode while it computes the beginnings of
those that have just come. Each has the tokens that it would have alone, by its own seed, stream and limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Manifest, NgramDrafter, TargetPlan
from runtime.arena import SlotMap
from runtime.assembly import assemble
from runtime.backends.base import Backend, LoadedEngine
from runtime.branch_request import BranchRequest
from runtime.branches import Branch, BranchState
from runtime.drafters import HostDrafter, make_host_drafter
from runtime.generation import FinishReason, Generation, GrowingGeneration, Span
from runtime.sampling import likeliest, logprobs
from runtime.stats import Stats
from runtime.text_stream import TextStream
from runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class BranchSpan:
    """What one pass has committed of one branch, by its place among those asked for. `result` comes with the last."""

    branch: int
    span: Span
    result: Generation | None = None


@dataclass
class _Running:
    """A live branch, and what stands behind it."""

    place: int
    asked: BranchRequest
    branch: Branch
    generation: GrowingGeneration
    drafter: HostDrafter | None
    began: float
    tokens: list[int]  # the prefix, and the branch's own


class BranchRunner:
    """Buffers for branches in one sequence. One run at a time."""

    def __init__(
        self,
        manifest: Manifest,
        plan: TargetPlan,
        backend: Backend,
        engines: Mapping[str, LoadedEngine],
        tokenizer: Tokenizer,
    ) -> None:
        self._manifest, self._tokenizer, self._geometry = manifest, tokenizer, manifest.target
        parts = assemble(manifest, plan, backend, engines)
        self._buffers, self._step, self._programs = parts.buffers, parts.step, parts.programs
        self._slots = SlotMap(names.TARGET, self._buffers, self._step)
        self._state = BranchState(self._slots, self._step, self._geometry.branches)
        self._kept = self._buffers.of(names.TARGET, names.KEPT_ROWS)
        self._kept_count = self._buffers.of(names.TARGET, names.KEPT_COUNT)
        self._move_to = self._buffers.of(names.TARGET, names.MOVE_TO)
        self._row_bytes = self._buffers.of(names.TARGET, names.KV)[..., :1, :].nbytes
        self.bytes_copied = 0  # of rows that stay, moved together behind a pass, and over dead slots

    def run(
        self, prefix: Sequence[int], asked: Sequence[BranchRequest], max_parallel: int
    ) -> Generator[BranchSpan, None, None]:
        """Spans as they are committed, of all branches; at most `max_parallel` live at once, in the order given."""
        self._state.init_prefix(prefix)
        self.bytes_copied = 0
        waiting = deque(enumerate(asked))
        running: list[_Running] = []
        self._prefill_prefix()
        while waiting or running:
            while waiting and len(running) < max_parallel and (not running or self._fits(waiting[0][1])):
                running.append(self._admit(*waiting.popleft()))
            yield from self._round(running)
            running = [each for each in running if each.generation.finish_reason is None]

    def _prefill_prefix(self) -> None:
        """Give rows to the prefix, a chunk a pass."""
        chunk = self._geometry.prefill_chunk
        while pending := self._state.prefix_pending[:chunk]:
            start = self._slots.length
            self._step.begin_target(start, start, pending, 0, logits=False)
            self._programs[names.PREFILL].run()
            self._state.commit_prefix(len(pending))

    def _end(self, asked: BranchRequest) -> int:
        """Most tokens that the branch may have of its own: those that it would have alone."""
        room = self._geometry.context - len(self._state.prefix)
        return min(room, len(asked.token_ids) + asked.request.max_new_tokens)

    def _fits(self, asked: BranchRequest) -> bool:
        return self._state.free > 0 and self._end(asked) <= self._state.unreserved

    def _admit(self, place: int, asked: BranchRequest) -> _Running:
        branch = self._state.add_branch(asked.token_ids, self._end(asked))
        self._buffers.set_sampling(branch.number, asked.request.sampling)
        tokens = [*self._state.prefix, *asked.token_ids]
        text = TextStream(self._tokenizer, tokens, asked.request.stop)
        stats = Stats(prompt_tokens=len(tokens), reused_tokens=len(self._state.prefix))
        drafter = None
        for settings in self._manifest.drafters:
            if settings.name == asked.request.drafter:
                assert isinstance(settings, NgramDrafter), "a plan of several branches has no others"
                drafter = make_host_drafter(settings)
        generation = GrowingGeneration(asked.request, text, stats)
        return _Running(place, asked, branch, generation, drafter, perf_counter(), tokens)

    def _round(self, running: Sequence[_Running]) -> Generator[BranchSpan, None, None]:
        """One pass over all that is pending, and what it has brought."""
        for each in running:
            cancel = each.asked.request.cancel
            if cancel is not None and cancel.is_set():
                each.generation.finish_reason = FinishReason.CANCELLED
                yield self._finish(each, Span([], ""))
        running = [each for each in running if each.generation.finish_reason is None]
        if not running:
            return
        self._make_room()
        trees = self._lay_out(running)
        program = self._programs[names.VERIFY]
        program.run()
        kept = self._kept[: int(self._kept_count[0])].copy()
        self.bytes_copied += int((kept != np.arange(len(kept))).sum()) * self._row_bytes
        assert program.tokens is not None
        assert program.counts is not None
        rows: list[tuple[Branch, int]] = []
        spans: list[tuple[_Running, Span]] = []
        tree = first = 0  # the next tree, and its root among the logits
        owner = self._step.branch[kept]
        for each, drafted in trees:
            mine = kept[owner == each.branch.number]
            if each.branch.root < 0:  # only a part of its beginning was fed
                rows.append((each.branch, len(mine)))
                continue
            count = int(program.counts[tree])
            room = each.branch.end - len(each.branch.tokens)
            chosen = program.tokens[first : first + min(count, room)].tolist()
            span, stay = each.generation.take(chosen, drafted, count - 1, len(chosen) == room)
            self._note(each, span, mine, first)
            stats = each.generation.stats
            if stats.rounds == 1:
                stats.ttft_ms, stats.first_span = (perf_counter() - each.began) * 1000, stats.new_tokens
            pending = len(each.branch.pending)
            each.branch.tokens += span.token_ids
            each.tokens += span.token_ids
            rows.append((each.branch, pending + stay - 1))
            spans.append((each, span))
            tree, first = tree + 1, first + 1 + drafted
        self._state.commit(rows, kept)
        for each, span in spans:
            over = each.generation.finish_reason is not None
            yield self._finish(each, span) if over else BranchSpan(each.place, span)

    def _lay_out(self, running: Sequence[_Running]) -> list[tuple[_Running, int]]:
        """Prepare the step: each branch with the nodes drafted for it, in order."""
        state, step = self._state, self._step
        state.begin()
        chunk = self._geometry.prefill_chunk
        share = max(0, (step.max_nodes + 1) // len(running) - 1)
        spare = step.largest_view - self._slots.length - sum(len(each.branch.pending) for each in running)
        trees = []
        for each in running:
            fed = state.feed(each.branch, chunk)
            chunk = max(1, chunk - fed + 1)
            drafted = 0
            room = each.branch.end - len(each.branch.tokens) - 1
            limit = min(share, room, spare)
            if each.branch.root >= 0 and each.drafter is not None and limit > 0:
                each.drafter.begin(each.tokens, step, limit)
                drafted = each.drafter.draft(limit, step.token_ids, step.parent, each.branch.root)
                step.append_nodes(drafted)
                spare -= drafted
            trees.append((each, drafted))
        return trees

    def _make_room(self) -> None:
        """Move live rows over dead ones where a step might not fit behind them."""
        most = self._step.most
        if self._slots.length + most <= self._step.largest_view or not self._state.dead:
            return
        for to, rows in self._state.moves(len(self._kept)):
            start = int(rows[0])
            self._step.begin_moves(start, int(rows[-1]) + 1 - start)
            self._kept[: len(rows)] = rows - start
            self._kept_count[0], self._move_to[0] = len(rows), to
            self._programs[names.compact(names.TARGET)].run()
            self.bytes_copied += len(rows) * self._row_bytes
        self._state.moved()

    def _note(self, each: _Running, span: Span, mine: NDArray[np.int64], first: int) -> None:
        """Log-probabilities, and what the drafter wants to see."""
        request, drafter = each.asked.request, each.drafter
        wanted = min(drafter.filler_top_k, self._geometry.vocab_size) if drafter is not None else 0
        if request.logprobs is None and not wanted:
            return
        path = mine[len(each.branch.pending) - 1 :] - each.branch.root  # the tip is node 0
        for index, token in enumerate(span.token_ids):
            row = first + int(path[index])
            logits = self._buffers.rows(names.TARGET, names.LOGITS_OUT, row, row + 1)[0]
            if request.logprobs is not None:
                span.logprobs.append(logprobs(logits, token, request.logprobs))
            if drafter is not None and wanted:
                drafter.observe(len(each.tokens) + index, likeliest(logits, wanted)[::-1])
        each.generation.logprobs += span.logprobs

    def _finish(self, each: _Running, last: Span) -> BranchSpan:
        self._state.finish(each.branch)
        rest = each.generation.finish()
        each.generation.stats.total_ms = (perf_counter() - each.began) * 1000
        span = Span(last.token_ids, last.text + rest.text, last.logprobs)
        return BranchSpan(each.place, span, each.generation.result())
