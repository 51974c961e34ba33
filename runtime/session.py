"""One sequence on one runtime: its tokens, its KV rows, and the loop that grows both.

State between steps: `tokens` (all committed, the last is the tip) and the slot map's `length` < tokens
that have KV rows. A step feeds the tokens that lack rows, so prefill, decoding, speculation, and going on
after any cut are the same loop.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from time import perf_counter
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import RequestError
from plans.manifest import Manifest, TargetPlan
from runtime.arena import SlotMap
from runtime.backends.base import LoadedEngine
from runtime.drafters import Drafter, make_drafter
from runtime.generation import FinishReason, Generation, GenerationStream, Span
from runtime.program import Program
from runtime.request import Options, Request, check_options
from runtime.sampling import TokenLogprob, logprobs
from runtime.stats import StageClock, Stats
from runtime.step import Step
from runtime.text_stream import CONTEXT_TOKENS, TextStream
from runtime.tokenizer import Tokenizer, as_ids

_BRANCH = 0


class Session:
    """A sequence that can be generated from, continued, cut and generated from again.

    One generation at a time; sessions of one runtime may run in different threads.
    """

    def __init__(
        self, manifest: Manifest, plan: TargetPlan, engines: Mapping[str, LoadedEngine], tokenizer: Tokenizer
    ) -> None:
        self._manifest, self._tokenizer = manifest, tokenizer
        self._step = Step(plan, manifest.model)
        self._slots = SlotMap(self._step)
        self._drafters: dict[str, Drafter] = {d.name: make_drafter(d) for d in manifest.drafters}
        self._told = dict.fromkeys(self._drafters, 0)  # tokens of the sequence each drafter has learned
        self._programs = {
            name: Program(name, data, self._step, engines, self._drafters) for name, data in plan.programs.items()
        }
        self._tokens: list[int] = []
        self._tip, self._compacted = 0, False  # of the last step: its tip's row, and whether rows were compacted
        self._busy = threading.Lock()

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and generated ones."""
        return list(self._tokens)

    def reset(self) -> None:
        """Start over with an empty sequence."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        with self._exclusive():
            self._truncate(length)

    def generate(
        self, prompt: str | Sequence[int] = "", *, whole: bool = False, **options: Unpack[Options]
    ) -> Generation:
        """Append `prompt` to the sequence and generate; see `stream`."""
        return self.stream(prompt, whole=whole, **options).result

    def stream(
        self, prompt: str | Sequence[int] = "", *, whole: bool = False, **options: Unpack[Options]
    ) -> GenerationStream:
        """Append `prompt` (text or token ids) to the sequence and generate, a span a step.

        With `whole`, `prompt` is the whole sequence: rows are kept as far as it agrees with the present one.
        Raises RequestError, before anything changes, for a prompt or an option that cannot be served.
        """
        request = check_options(options, list(self._drafters), self._manifest.text.eos_token_ids)
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
        self._check_prompt(ids, whole)
        context = ids if whole else [*self._tokens[-CONTEXT_TOKENS:], *ids]
        text = TextStream(self._tokenizer, context, request.stop)
        return GenerationStream(self._run(ids, whole, request, text))

    def _check_prompt(self, ids: list[int], whole: bool) -> None:
        vocabulary, context = self._manifest.model.vocab_size, self._manifest.model.context
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise RequestError(f"Token id {wrong} is not in the vocabulary; ids go from 0 to {vocabulary - 1}.")
        total = len(ids) + (0 if whole else len(self._tokens))
        if total == 0:
            raise RequestError("The prompt is empty; there is nothing to continue. Pass text or token ids.")
        if total >= context:
            raise RequestError(
                f"The sequence would have {total} tokens before any is generated; the plan's context is {context}. "
                "Shorten the prompt, or build the plan with a larger capacity.context."
            )

    def _run(
        self, ids: list[int], whole: bool, request: Request, text: TextStream
    ) -> Generator[Span, None, Generation]:
        with self._exclusive():
            started = perf_counter()
            self._place(ids, whole)
            stats = Stats(prompt_tokens=len(self._tokens), reused_tokens=self._slots.length)
            clock = StageClock(list(self._programs.values()))
            generation = _Growing(request, text, stats)
            self._step.set_sampling(request.sampling, _BRANCH)
            end = min(self._manifest.model.context, len(self._tokens) + request.max_new_tokens)
            self._prefill(request, stats)
            while generation.finish_reason is None:
                if _cancelled(request):
                    generation.finish_reason = FinishReason.CANCELLED
                    break
                span = self._decode(request, end, generation)
                if stats.rounds == 1:
                    stats.ttft_ms, stats.first_span = (perf_counter() - started) * 1000, stats.new_tokens
                yield span
            if (rest := generation.finish()).text:
                yield rest
            stats.total_ms = (perf_counter() - started) * 1000
            clock.fill(stats)
            return generation.result()

    def _place(self, ids: list[int], whole: bool) -> None:
        """Make the sequence what is to be continued; at least the tip stays without a row."""
        if whole:
            shared = next(
                (i for i, (a, b) in enumerate(zip(self._tokens, ids, strict=False)) if a != b),
                min(len(self._tokens), len(ids)),
            )
            self._truncate(shared)
            ids = ids[shared:]
        self._tokens += ids
        self._slots.truncate(len(self._tokens) - 1)

    def _truncate(self, length: int) -> None:
        del self._tokens[length:]
        self._slots.truncate(length)
        for name, drafter in self._drafters.items():
            if self._told[name] > length:
                drafter.reset()
                self._told[name] = 0

    def _prefill(self, request: Request, stats: Stats) -> None:
        """Give rows to all but the last chunk of pending tokens."""
        chunk = self._manifest.model.prefill_chunk
        program = self._programs[names.PREFILL]
        while len(self._tokens) - self._slots.length > chunk and not _cancelled(request):
            start = self._slots.length
            pending = self._tokens[start : start + chunk]
            self._step.begin(start, self._slots.next_position(), pending, _BRANCH, logits=False)
            program.run()
            self._slots.commit(chunk, compacted=False)
            stats.prefill_passes += 1

    def _decode(self, request: Request, end: int, generation: _Growing) -> Span:
        """One round: feed what is pending with a draft behind it, and commit what the target chose."""
        step, slots, tokens = self._step, self._slots, self._tokens
        pending = tokens[slots.length :]
        step.begin(slots.length, slots.next_position(), pending, _BRANCH, logits=True)
        if request.drafter is None:
            program = self._programs[names.DECODE]
        else:
            program = self._programs[names.speculate(request.drafter)]
            self._tell(request.drafter)
            step.draft_limit = min(step.max_nodes, end - len(tokens) - 1)
        program.run()
        assert program.tokens is not None
        compacted = program.counts is not None
        count = int(program.counts[_BRANCH]) if program.counts is not None else 1
        chosen = program.tokens[:count].tolist()
        drafted = step.new_tokens - len(pending)
        span, kept = generation.take(chosen, drafted, len(tokens) == end - count)
        self._tip, self._compacted = len(pending) - 1, compacted
        if request.logprobs is not None:
            for index, token in enumerate(span.token_ids):
                span.logprobs.append(logprobs(self.step_logits(index), token, request.logprobs))
            generation.logprobs += span.logprobs
        slots.commit(len(pending) + kept - 1, compacted)
        tokens += span.token_ids
        return span

    def _tell(self, name: str) -> None:
        """Let a drafter learn the committed tokens it has not seen."""
        told = self._told[name]
        self._drafters[name].extend(self._tokens[told:] if told else self._tokens)
        self._told[name] = len(self._tokens)

    def step_logits(self, index: int) -> NDArray[np.float32]:
        """Logits f32 `[vocab]` that the `index`-th token of the last span was chosen by: a view until the next step."""
        row = int(self._step.kept_rows[self._tip + index]) - self._tip if self._compacted else 0
        logits: NDArray[np.float32] = self._step.logits[row]
        return logits

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)


class _Growing:
    """A generation in progress: what has been committed, and whether it has ended."""

    def __init__(self, request: Request, text: TextStream, stats: Stats) -> None:
        self._request, self._text, self._stats = request, text, stats
        self._token_ids: list[int] = []
        self._shown: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def take(self, chosen: list[int], drafted: int, last: bool) -> tuple[Span, int]:
        """Commit the target's choices of one round up to an end token or a stop string; how many stay."""
        ends = self._request.eos_token_ids
        kept = next((i + 1 for i, token in enumerate(chosen) if token in ends), len(chosen))
        ended = chosen[kept - 1] in ends
        pushed = self._text.push(chosen[: kept - ended])
        if pushed.stop is not None:
            kept, ended = pushed.consumed, True
        if ended:
            self.finish_reason = FinishReason.STOP
        elif last:
            self.finish_reason = FinishReason.LENGTH
        stats = self._stats
        stats.rounds += 1
        stats.drafted += drafted
        stats.accepted += min(kept, len(chosen) - 1)
        stats.new_tokens += kept
        self._token_ids += chosen[:kept]
        self._shown.append(pushed.text)
        return Span(chosen[:kept], pushed.text), kept

    def finish(self) -> Span:
        """The text that was held back; it may complete a stop string after all."""
        text = self._text.finish()
        self._shown.append(text)
        if self._text.stopped is not None:
            self.finish_reason = FinishReason.STOP
        return Span([], text)

    def result(self) -> Generation:
        assert self.finish_reason is not None
        return Generation("".join(self._shown), self._token_ids, self.finish_reason, self._stats, self.logprobs)


class _Exclusive:
    """Holds a session's lock, and refuses instead of waiting: a second generation is a caller's mistake."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RequestError(
                "This session is generating already; finish or close that stream, or open another session."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _cancelled(request: Request) -> bool:
    return request.cancel is not None and request.cancel.is_set()
