"""One sequence on one runtime: its tokens, its KV rows, and the loop that grows both.

State between steps: `tokens` (all committed, the last is the tip) and the slot table's `length` < tokens
that have KV rows. A step feeds the tokens that lack rows, so prefill, decoding, speculation, and going on
after any cut are the same loop.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import RequestError
from plans.manifest import Manifest
from runtime.drafters import Drafter
from runtime.drafters.adaptive import AdaptiveSpeculation, AdaptiveSpeculations
from runtime.drafters.partial import PartialDrafter, waiting
from runtime.exclusive import Exclusive
from runtime.execution.assembly import Loaded, assemble
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.target_pass import TargetPasses
from runtime.generation import FinishReason, Generation, GenerationStream, GrowingGeneration, Run, Span
from runtime.kv.session_arenas import SessionArenas
from runtime.kv.slots import BRANCH, SlotTable
from runtime.prefix_cache.cache import PrefixCache
from runtime.prefix_cache.radix_tree import common_length
from runtime.prefix_cache.session_memory import SessionMemory
from runtime.request import Options, Request, check_fresh, check_options, check_request
from runtime.sampling import likeliest, logprobs
from runtime.stats import StageClock, Stats
from runtime.text.prompt import Messages, Prompt, choose_prompt, prepare_prompt
from runtime.text.stream import TextStream
from runtime.trace import read_round


class Session:
    """A sequence that can be generated from, continued, cut and generated from again.

    One generation at a time; sessions of one runtime may run in different threads.
    """

    def __init__(self, loaded: Loaded, cache: PrefixCache | None = None) -> None:
        self._manifest = manifest = loaded.manifest
        self._tokenizer, self._geometry = loaded.tokenizer, manifest.target
        self._limits = loaded.plan.symbols[names.TARGET]
        parts = assemble(loaded)
        self._buffers, self._step, self._programs = parts.buffers, parts.step, parts.programs
        self._drafters, self._host_drafters = parts.drafters, parts.on_host
        self._slots = SlotTable(names.TARGET, self._buffers, self._step)
        self._passes = TargetPasses(self._step, self._programs)
        self._arenas = SessionArenas(manifest, parts, self._slots, self._passes)
        self._memory = None if cache is None else SessionMemory(cache, self._buffers, self._slots, parts.by_engine)
        self._adaptive = AdaptiveSpeculations(manifest)
        self._followed = 0  # the last pass that a drafter has followed
        self._tokens: list[int] = []
        self._changes = 0  # counts what may make a prepared prompt out of date
        self._chosen_by: tuple[int, NDArray[np.int64] | None] = (0, None)  # the last step's tip, and its kept rows
        self._exclusive = Exclusive(threading.Lock())

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and generated ones."""
        return list(self._tokens)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def limits(self) -> Mapping[str, int]:
        """The largest value of every symbol of the target's steps."""
        return self._limits

    @property
    def buffers(self) -> Buffers:
        return self._buffers

    @property
    def programs(self) -> Mapping[str, Program]:
        return self._programs

    def stage_clock(self) -> StageClock:
        """Times of all stages from now on."""
        return StageClock(list(self._programs.values()))

    def reset(self) -> None:
        """Start over with an empty sequence."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Raises RequestError for a length the sequence does not have."""
        with self._exclusive:
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= len(self._tokens):
                raise RequestError(f"length is {length!r}; pass a whole number from 0 to {len(self._tokens)}.")
            self._truncate(length)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        whole: bool = False,
        **options: Unpack[Options],
    ) -> Generation:
        """Append `prompt` to the sequence and generate; see `stream`."""
        return self.stream(prompt, messages=messages, whole=whole, **options).result

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        whole: bool = False,
        **options: Unpack[Options],
    ) -> GenerationStream:
        """Append `prompt` (text or token ids; without one the text goes on) and generate, a span a step.

        With `whole` it is the whole sequence, as `messages` are the whole conversation: rows are kept as far as it
        agrees with the present one. Raises RequestError, before anything changes, for what cannot be served.
        """
        request = check_request(options, self._manifest)
        prompt = "" if prompt is None and messages is None else prompt
        chosen = choose_prompt(prompt, messages, self._tokenizer, self._geometry)
        return GenerationStream(self.run(chosen, request, whole=whole or messages is not None))

    def run(self, prompt: str | Sequence[int], request: Request, *, whole: bool = False) -> Run:
        """Generate as `stream`, by checked options: a span a pass, None behind a pass over a part of a prompt."""
        return self._run(prompt, whole, request, self._prepare(prompt, whole, request), self._changes)

    def time_round(self, chain: Sequence[int], drafter: str, *, partial: bool = False) -> float:
        """Milliseconds of the target's part of a round: over the tip and a `chain` of drafted tokens behind it.

        `drafter` is one that the host runs, whose round it is, or "none" for a round without a chain; with `partial`
        it runs over the partial arena. Nothing is committed. Raises RequestError where other tokens than the tip lack
        rows, or the chain has no room.
        """
        check_options(Options(drafter=drafter), list(self._drafters), ())
        if drafter != "none" and drafter not in self._host_drafters:
            raise RequestError(f"The drafter {drafter!r} drafts in an engine of its own; name an n-gram drafter.")
        with self._exclusive:
            arena, tokens = self._arenas.either(partial=partial), self._tokens
            most = min(self._step.max_nodes, self._geometry.context - len(tokens), arena.room - 1)
            if len(tokens) - arena.known != 1 or len(chain) > most:
                raise RequestError(
                    f"The sequence has {len(tokens)} tokens, {arena.known} of them with rows, and room for a chain of "
                    f"{max(most, 0)}, but {len(chain)} are to follow; generate first, or pass fewer."
                )
            name = names.DECODE if drafter == "none" else names.speculate(drafter)
            return self._passes.time_round(arena, tokens[-1], chain, name)

    @contextmanager
    def exploring(self, prompt: str | Sequence[int], request: Request, stats: Stats) -> Iterator[Prompt]:
        """Hold the session for `read` and `look_ahead` behind `prompt`, of which nothing has been taken in yet.

        At the end the sequence is what it was, with the prompt if that was read, and the stages' times are in `stats`.
        Raises RequestError as `stream`.
        """
        with self._exclusive:
            clock = self.stage_clock()
            yield self._prepare(prompt, False, request)
            clock.fill(stats)

    def read(self, prompt: Prompt, request: Request, stats: Stats) -> NDArray[np.float32] | None:
        """Append `prompt` and give rows to all of it; logits f32 `[1, vocab]` behind it, None if it was cancelled."""
        self._changes += 1
        self._place(prompt.ids, whole=False)
        stats.prompt_tokens, stats.reused_tokens = len(self._tokens), self._slots.length
        for _ in self._prefill(request, None, stats):
            pass
        start = self._slots.length
        if len(self._tokens) - start > self._geometry.prefill_chunk:
            return None
        pending = self._tokens[start:]
        self._step.begin_target(start, self._slots.next_position(), pending, BRANCH, logits=True)
        self._passes.run(names.PREFILL)
        self._slots.commit(len(pending), kept=None)
        return self._logits(0, 1)

    def look_ahead(self, tokens: list[int], distance: int, visible: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Logits f32 `[tokens, vocab]`, a view until the next pass, of tokens that do not belong to the sequence.

        They stand `distance` positions behind it and take the next rows in order. `visible` bool `[tokens, rows]` says
        which of the rows behind the sequence each one sees, those of these tokens included.
        """
        past = self._slots.length + visible.shape[1] - len(tokens)
        self._step.begin_beams(past, self._slots.next_position() + distance - 1, tokens, visible)
        self._buffers.send(names.TARGET, names.ATTN_BIAS, self._step.bias_elements)
        self._passes.run(names.BEAM)
        return self._logits(0, len(tokens))

    def text_behind(self, token_ids: list[int]) -> str:
        """What `token_ids` would add to the sequence's text."""
        text = TextStream(self._tokenizer, self._tokens)
        return text.push(token_ids).text + text.finish()

    def _prepare(self, prompt: str | Sequence[int], whole: bool, request: Request) -> Prompt:
        return prepare_prompt(prompt, [] if whole else self._tokens, request.stop, self._tokenizer, self._geometry)

    def _run(self, prompt: str | Sequence[int], whole: bool, request: Request, prepared: Prompt, changes: int) -> Run:
        with self._exclusive:
            check_fresh(request.constraint)  # again: another generation may have had it since
            if changes != self._changes:  # the session was used between the call and the first span
                prepared = self._prepare(prompt, whole, request)
            self._changes += 1
            started = perf_counter()
            self._place(prepared.ids, whole)
            stats = Stats(prompt_tokens=len(self._tokens), partial_mode=request.partial_kv)
            clock = self.stage_clock()
            generation = GrowingGeneration(request, prepared.text, stats)
            self._buffers.set_sampling(BRANCH, request.sampling)
            drafter, adaptive = self._drafters.get(request.drafter or ""), self._adaptive.of(request)
            if self._memory is not None:
                stats.cached_tokens = self._memory.recall(self._tokens)
            drafting = None if adaptive is not None and adaptive.disabled else drafter
            if drafting is not None:
                self._slots.truncate(drafting.resume(self._tokens, self._slots.length, self._passes.count))
            stats.reused_tokens = self._slots.length
            if self._memory is not None:
                self._memory.note_reused(stats.reused_tokens)
            end = min(self._geometry.context, len(self._tokens) + request.max_new_tokens)
            if not (yield from self._prefill(request, drafting, stats)):
                generation.finish_reason = FinishReason.CANCELLED
            ahead = self._arenas.begin(request, drafter, stats, len(self._tokens), end - len(self._tokens))
            disabled = adaptive is not None and adaptive.disabled
            try:
                while generation.finish_reason is None:
                    if request.cancelled:
                        generation.finish_reason = FinishReason.CANCELLED
                        break
                    switched = adaptive is not None and disabled != adaptive.disabled
                    if drafter is not None and switched and not waiting(ahead):
                        if disabled:
                            yield from self._enable(request, drafter, stats)
                        disabled = not disabled
                        continue
                    tentative = [] if ahead is None else ahead.advance(self._tokens, end, adaptive, disabled=disabled)
                    if drafter is not None and ahead is not None and ahead.has_missed():
                        yield from self._enable(request, drafter, stats)
                        continue
                    if ahead is None or not tentative:
                        span = self._round(request, drafter, ahead, adaptive, end, generation)
                        if stats.rounds == 1:
                            stats.ttft_ms, stats.first_span = (perf_counter() - started) * 1000, stats.new_tokens
                    elif request.tentative:
                        span = Span(tentative, generation.preview(ahead.tentative), tentative=True)
                    else:
                        continue
                    handed_over = perf_counter()
                    yield span
                    started += perf_counter() - handed_over  # the caller's time is not ours
            except BaseException as error:
                if ahead is not None:
                    ahead.take_back()
                if isinstance(error, GeneratorExit):
                    self._keep(drafter, wait=False)  # it may be a finaliser that runs while this thread is at the cache
                raise
            if ahead is not None:
                ahead.take_back()
            self._keep(drafter)
            rest = generation.finish()
            stats.total_ms = (perf_counter() - started) * 1000
            clock.fill(stats)
            if rest.text:
                yield rest
            return generation.result()

    def _keep(self, drafter: Drafter | None, *, wait: bool = True) -> None:
        if self._memory is not None:
            if drafter is not None and self._followed == self._passes.count:
                drafter.absorb(self._tokens)  # what the last pass has left
            self._memory.keep(self._tokens, wait=wait)

    def _place(self, ids: list[int], whole: bool) -> None:
        """Make the sequence what is to be continued; at least the tip stays without a row."""
        if whole:
            self._truncate(common_length(self._tokens, ids))
            ids = ids[len(self._tokens) :]
        self._tokens += ids
        self._slots.truncate(len(self._tokens) - 1)

    def _truncate(self, length: int) -> None:
        self._changes += 1
        del self._tokens[length:]
        self._slots.truncate(length)
        self._arenas.truncate(length)
        for drafter in self._drafters.values():
            drafter.truncate(length)

    def _prefill(self, request: Request, drafter: Drafter | None, stats: Stats) -> Generator[None, None, bool]:
        """Give rows to all but the last chunk of pending tokens, a pass at a time; False if it was cancelled before."""
        chunk = self._geometry.prefill_chunk
        while len(self._tokens) - self._slots.length > chunk:
            if request.cancelled:
                return False
            start = self._slots.length
            pending = self._tokens[start : start + chunk]
            if drafter is not None:
                drafter.absorb(self._tokens)
            self._step.begin_target(start, self._slots.next_position(), pending, BRANCH, logits=False)
            self._passes.run(names.PREFILL)
            self._slots.commit(chunk, kept=None)
            if drafter is not None:
                drafter.follow(start, chunk, None, self._passes.count)
                self._followed = self._passes.count
            stats.prefill_passes += 1
            yield
        return True

    def _enable(self, request: Request, drafter: Drafter, stats: Stats) -> Generator[None, None, None]:
        """A drafter follows again: what it missed is computed once more, unless the request is cancelled meanwhile."""
        self._slots.truncate(drafter.resume(self._tokens, self._slots.length, self._passes.count))
        yield from self._prefill(request, drafter, stats)

    def _round(
        self,
        request: Request,
        drafter: Drafter | None,
        ahead: PartialDrafter | None,
        adaptive: AdaptiveSpeculation | None,
        end: int,
        generation: GrowingGeneration,
    ) -> Span:
        """One round: what runs `ahead` has its tokens confirmed, or the drafter drafts where `adaptive` lets it."""
        began = perf_counter()
        if ahead is not None and ahead.tentative:
            span = self._decode(request, ahead, end, generation)
            ahead.note_confirmed(1000 * (perf_counter() - began))
            return span
        settled = len(self._tokens) - self._slots.length == 1  # a round that also catches up tells nothing
        drafting, disabled = adaptive is None or adaptive.drafting, adaptive is not None and adaptive.disabled
        if drafter is not None and not drafting and not disabled:
            drafter.absorb(self._tokens)  # not in the time of a plain round
            began = perf_counter()
        span = self._decode(request, None if disabled else drafter, end, generation, draft=drafting)
        spent, tokens = perf_counter() - began, len(span.token_ids)
        generation.stats.plain_rounds += not drafting
        if settled and adaptive is not None and (ahead is None or ahead.steady):
            adaptive.note(spent, tokens)
        if ahead is not None:
            ahead.note_plain(
                1000 * spent, tokens, settled=settled and (drafting or disabled) and generation.stats.rounds > 1
            )
        return span

    def _decode(
        self, request: Request, drafter: Drafter | None, end: int, generation: GrowingGeneration, *, draft: bool = True
    ) -> Span:
        """One round: feed what is pending with a draft behind it, and commit what the target chose.

        Without `draft`, the drafter has absorbed what the last pass left, and follows this one.
        """
        step, tokens = self._step, self._tokens
        room = end - len(tokens)
        arena, passed = self._arenas.decode(request.partial_kv, tokens, drafter if draft else None, room)
        program, chosen, count = passed.program, passed.chosen, passed.count
        if request.constraint is not None:
            position = int(step.positions[passed.pending - 1])
            chosen = [request.constraint.choose(self._logits(0, 1)[0], position, request.sampling)]
        span, kept = generation.take(chosen, step.drafted, count - 1, len(chosen) == room)
        self._chosen_by = passed.pending - 1, program.kept
        if request.logprobs is not None:
            for index, token in enumerate(span.token_ids):
                span.logprobs.append(logprobs(self.step_logits(index), token, request.logprobs))
            generation.logprobs += span.logprobs
        if request.on_round is not None:
            drafted_by = drafter if program.kept is not None else None
            accepted = min(kept, count - 1)
            request.on_round(read_round(step, passed.pending, span.token_ids, accepted, program.kept, drafted_by))
        if drafter is not None and drafter.filler_top_k:
            wanted = min(drafter.filler_top_k, self._geometry.vocab_size)
            for index in range(len(span.token_ids)):
                drafter.observe(len(tokens) + index, likeliest(self.step_logits(index), wanted)[::-1])
        if request.constraint is not None:
            request.constraint.advance(span.token_ids[0])
        tokens += span.token_ids  # before the rows: a row without its token would be worse than the reverse
        rows = passed.rows(kept)
        arena.slots.commit(rows, program.kept)
        if drafter is not None:
            drafter.follow(passed.start, rows, program.kept, self._passes.count)
            self._followed = self._passes.count
        self._arenas.ran(arena, passed, request.partial_kv, generation.stats)
        return span

    def step_logits(self, index: int) -> NDArray[np.float32]:
        """Logits f32 `[vocab]` that the `index`-th token of the last span was chosen by: a view until the next step."""
        tip, kept = self._chosen_by
        row = 0 if kept is None else int(kept[tip + index]) - tip
        logits: NDArray[np.float32] = self._logits(row, row + 1)[0]
        return logits

    def _logits(self, start: int, stop: int) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._buffers.rows(names.TARGET, names.LOGITS_OUT, start, stop)
        return rows
