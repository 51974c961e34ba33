"""A sequence that stays open: generate from it, continue it, truncate it, and generate again."""

from __future__ import annotations

import threading
import weakref
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, Unpack

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import BusyError, RequestError
from outrider.plans.host_drafters import HostDrafter
from outrider.plans.manifest import Manifest
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.program import Program
from outrider.runtime.generation import Generation, Run, Stream
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import Request, resolve, resolve_drafter
from outrider.runtime.rounds.alone import look_ahead, read, time_round
from outrider.runtime.sequence import Sequence
from outrider.runtime.stats import StageClock, Stats
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.runtime.text.common_length import common_length
from outrider.runtime.text.prompt import Messages, Prompt, TemplateVariables, choose_prompt, prepare_prompt
from outrider.runtime.text.stream import TextStream


class _Exclusive:
    """Holds a session's lock, and refuses instead of waiting: a second generation is a caller's mistake."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("This session is generating already; finish or close that stream, or open another session.")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Session:
    """One sequence, many turns. It borrows a step loop of its runtime from its first use until it is closed.

    It runs one generation at a time; sessions of one runtime may run in different threads.
    """

    def __init__(self, pool: StepLoopPool) -> None:
        self._pool = pool
        self._manifest: Manifest = pool.loaded.manifest
        self._tokenizer, self._geometry = pool.loaded.tokenizer, pool.loaded.manifest.target
        self._limits = pool.loaded.plan.symbols[names.TARGET]
        self._loop: StepLoop | None = None
        self._sequence: Sequence | None = None
        self._return: Callable[[], object] = _nothing
        self._changes = 0  # counts changes that make a prepared prompt out of date
        self._exclusive = _Exclusive(threading.Lock())

    # The loop, and the sequence on it.

    @property
    def loop(self) -> StepLoop:
        """The loop that the session has borrowed."""
        return self._take()[0]

    def _take(self, ids: abc.Sequence[int] = ()) -> tuple[StepLoop, Sequence]:
        """Return the loop and the sequence; a step loop that is borrowed now may have the beginning of `ids`."""
        if self._loop is None or self._sequence is None:
            loop = self._pool.borrow(ids)
            there = loop.sequences
            if ids and loop.prefix_cache is not None and len(there) == 1 and not loop.parts.prefix and loop.cache.alone:
                self._sequence = there[0]
            else:
                loop.begin()
                self._sequence = loop.open()
            self._loop = loop
            self._return = weakref.finalize(self, self._pool.give_back, loop)
        return self._loop, self._sequence

    def close(self) -> None:
        """Give the loop back. The session is empty then, and borrows a step loop again when it is used."""
        with self._exclusive:
            self._changes += 1
            self._loop = self._sequence = None
            self._return()

    def __repr__(self) -> str:
        return f"<Session of {self._manifest.name!r}, {len(self.token_ids)} tokens>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Session holds memory of its process; keep its `token_ids`, and continue them elsewhere.")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def token_ids(self) -> list[int]:
        """Every token of the sequence, prompts and generated ones."""
        sequence = self._sequence
        return [] if sequence is None else sequence.tokens[: sequence.confirmed]

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def limits(self) -> Mapping[str, int]:
        """The largest value of every symbol of the target's steps."""
        return self._limits

    @property
    def buffers(self) -> Buffers:
        return self.loop.buffers

    @property
    def programs(self) -> Mapping[str, Program]:
        return self.loop.programs

    def stage_clock(self) -> StageClock:
        """Times of all stages from now on."""
        return self.loop.stage_clock()

    def reset(self) -> None:
        """Start over with an empty sequence."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Raises RequestError for a length the sequence does not have."""
        with self._exclusive:
            most = len(self.token_ids)
            if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= most:
                raise RequestError(f"length is {length!r}; pass a whole number from 0 to {most}.")
            self._changes += 1
            if self._sequence is not None:
                self.loop.truncate(self._sequence, length)

    # Generating.

    def generate(
        self,
        prompt: str | abc.Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        whole: bool = False,
        **options: Unpack[Options],
    ) -> Generation:
        """Append `prompt` to the sequence and generate; see `stream`."""
        return self.stream(
            prompt, messages=messages, chat_template_kwargs=chat_template_kwargs, whole=whole, **options
        ).result

    def stream(
        self,
        prompt: str | abc.Sequence[int] | None = None,
        *,
        messages: Messages | None = None,
        chat_template_kwargs: TemplateVariables | None = None,
        whole: bool = False,
        **options: Unpack[Options],
    ) -> Stream:
        """Append `prompt` (text or token ids; without one the text continues) and generate, a span a step.

        `chat_template_kwargs` are values that the chat template reads beside `messages`, such as `enable_thinking`.
        With `whole` it is the whole sequence, as `messages` are the whole conversation: KV is kept as far as it agrees
        with the present one. Raises RequestError, before anything changes, for what cannot be served.
        """
        request = self.resolve(options)
        prompt = "" if prompt is None and messages is None else prompt
        chosen = choose_prompt(prompt, messages, self._tokenizer, self._geometry, chat_template_kwargs)
        return Stream(self.run(chosen, request, whole=whole or messages is not None))

    def resolve(self, options: Options) -> Request:
        """Check options against the plan. Raises RequestError."""
        return resolve(options, self._manifest, self._pool.loaded.grammars)

    def run(self, prompt: str | abc.Sequence[int], request: Request, *, whole: bool = False) -> Run:
        """Generate as `stream` does, from checked options: a span a pass, None for a pass over a part of a prompt."""
        return self._run(prompt, whole, request, self._prepare(prompt, whole, request), self._changes)

    def _prepare(self, prompt: str | abc.Sequence[int], whole: bool, request: Request) -> Prompt:
        present, given, least = [] if whole else self.token_ids, request.generated, request.min_tokens
        return prepare_prompt(
            prompt, present, request.stop, self._tokenizer, self._geometry, generated=given, min_tokens=least
        )

    def _run(
        self, prompt: str | abc.Sequence[int], whole: bool, request: Request, prepared: Prompt, changes: int
    ) -> Run:
        with self._exclusive:
            if changes != self._changes:  # the session was used between the call and the first span
                prepared = self._prepare(prompt, whole, request)
            self._changes += 1
            loop, sequence = self._take(prepared.ids if whole else ())
            clock = loop.stage_clock()
            self._append(loop, sequence, prepared.ids, whole)
            loop.start(sequence, request, prepared.text)
            waiting = True  # for the prefix cache, if another thread holds it
            try:
                while not sequence.over:
                    for committed in loop.step([sequence]):
                        span = loop.show(committed)
                        if span.error is not None:
                            raise span.error
                        dropped = len(committed.token_ids) - len(span.token_ids)
                        if dropped:  # after a stop string
                            loop.truncate(sequence, len(sequence.tokens) - dropped)
                        if span.result is not None:
                            clock.fill(span.result.stats)
                        if span.token_ids or span.text or span.result is not None:
                            with loop.pausing():
                                yield span
                    if not sequence.decoding:
                        yield None
            except GeneratorExit:
                waiting = False  # a finaliser may run while this thread holds the cache
                raise
            finally:
                loop.finish(sequence, wait=waiting)

    @staticmethod
    def _append(loop: StepLoop, sequence: Sequence, ids: list[int], whole: bool) -> None:
        """Turn the sequence into what is to be continued."""
        if whole:
            loop.truncate(sequence, common_length(sequence.tokens, ids))
            ids = ids[len(sequence.tokens) :]
        sequence.tokens += ids

    def step_logits(self, index: int) -> NDArray[np.float32]:
        """Return the logits f32 `[vocab]` that chose token `index` of the last span: a view until the next step.

        On a device, a round that was launched since may have overwritten them: they are computed again then, and rounds
        of this generation wait from now on. One with `logprobs` does so from its start.
        """
        loop, sequence = self._take()
        return loop.logits_of(sequence, index)

    def text_behind(self, token_ids: list[int]) -> str:
        """Return the text that `token_ids` would add to the sequence's."""
        text = TextStream(self._tokenizer, self.token_ids)
        return text.push(token_ids).text + text.finish()

    def time_round(self, chain: abc.Sequence[int], drafter: str | None, *, partial: bool = False) -> float:
        """Milliseconds of the target's part of a round: over the tip and a `chain` of drafted tokens after it.

        `drafter` is one that the host runs, whose round it is, or "none" for a round without a chain; None verifies the
        chain, if there is one, of any drafter. With `partial` it reads the partial cache. Nothing is committed.
        Raises RequestError where other tokens than the tip lack KV, or the chain has no room.
        """
        by_name = {each.name: each for each in self._manifest.drafters}
        if drafter is not None:
            resolve_drafter(drafter, self._manifest)
        if drafter not in (None, "none") and not isinstance(by_name[drafter], HostDrafter):
            raise RequestError(f"The drafter {drafter!r} drafts in an engine of its own; name one on the host.")
        with self._exclusive:
            loop, sequence = self._take()
            drafts = bool(chain) if drafter is None else drafter != "none"
            return time_round(loop.parts, sequence, chain, drafts=drafts, partial=partial)

    # Beam search.

    @contextmanager
    def exploring(self, prompt: str | abc.Sequence[int], request: Request, stats: Stats) -> Iterator[Prompt]:
        """Hold the session for `read` and `look_ahead` after `prompt`, which has not been appended yet.

        At the end the sequence is what it was, with the prompt if it was read, and `stats` has the times of the stages.
        Raises RequestError as `stream` does.
        """
        with self._exclusive:
            prepared = self._prepare(prompt, False, request)
            clock = self.stage_clock()
            yield prepared
            clock.fill(stats)

    def read(self, prompt: Prompt, request: Request, stats: Stats) -> NDArray[np.float32] | None:
        """Append `prompt` and give all of it KV; logits f32 `[1, vocab]` after it, None if it was cancelled."""
        self._changes += 1
        loop, sequence = self._take()
        sequence.tokens += prompt.ids
        return read(loop.parts, sequence, request, stats)

    def look_ahead(self, tokens: list[int], distance: int, visible: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Logits f32 `[tokens, vocab]`, a view until the next pass, of tokens that do not belong to the sequence.

        They stand `distance` positions after it and take the next slots in order. `visible` bool `[tokens, slots]`
        says which of the slots after the sequence each one sees, those of these tokens included.
        """
        loop, sequence = self._take()
        return look_ahead(loop.parts, sequence, tokens, distance, visible)


def _nothing() -> None:
    """Do nothing, for a step loop that was never borrowed."""
