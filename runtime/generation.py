"""What a generation gives back: spans as they are committed, and the whole at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from runtime.request import Request
from runtime.sampling import TokenLogprob
from runtime.stats import Stats
from runtime.text.stream import TextStream


class FinishReason(StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # of a request, which passed


@dataclass(frozen=True)
class Span:
    """What one step committed. `text` holds whole characters only and may lag behind `token_ids`.

    A `tentative` one is not committed, and may never be: its tokens come behind those of earlier tentative spans, its
    text is what will be shown behind the text of spans so far if all of them stay and none follows, and the next span
    that is not tentative takes their place.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tentative: bool = False


@dataclass(frozen=True)
class Generation:
    """A finished generation. `token_ids` ends with the end token, if one ended it; `text` leaves it out."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprob] = field(default_factory=list)


Run = Generator[Span | None, None, Generation]
"""A generation pass by pass: a span, or None behind a pass over a part of the prompt alone."""


class GenerationStream:
    """Iterate for spans; `result` is the whole generation once iteration has ended.

    Closing it, or leaving it unfinished, ends the generation; the session keeps what was committed.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._result: Generation | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Span]:
        return self

    def __next__(self) -> Span:
        try:
            while (span := next(self._run)) is None:
                pass
            return span
        except StopIteration as end:
            self._result = end.value or self._result  # an exhausted generator returns None
            raise StopIteration from None
        except Exception as error:
            self._error = error
            raise

    def close(self) -> None:
        self._run.close()

    @property
    def result(self) -> Generation:
        """The generation; runs it to its end first, if need be."""
        for _ in self:
            pass
        if self._result is None:
            reason = "failed" if self._error is not None else "was closed"
            raise RuntimeError(f"The stream {reason} before its generation ended; it has no result.") from self._error
        return self._result


class GrowingGeneration:
    """A generation in progress: what has been committed, and whether it has ended."""

    def __init__(self, request: Request, text: TextStream, stats: Stats) -> None:
        self._request, self._text, self.stats = request, text, stats
        self._token_ids: list[int] = []
        self._shown: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def take(self, chosen: list[int], drafted: int, accepted: int, last: bool) -> tuple[Span, int]:
        """Commit the target's choices of one round up to an end token or a stop string; how many stay."""
        tokens, reason = self.cut(chosen, last)
        span = self.show(tokens, reason, drafted, accepted)
        return span, len(span.token_ids)

    def cut(self, chosen: list[int], last: bool) -> tuple[list[int], FinishReason | None]:
        """The target's choices of one round up to an end token, and why it ends there, as far as tokens tell.

        `last` says that there is no room for more. Changes nothing.
        """
        ends = self._request.eos_token_ids
        kept = next((i + 1 for i, token in enumerate(chosen) if token in ends), len(chosen))
        if chosen[kept - 1] in ends:
            return chosen[:kept], FinishReason.STOP
        return chosen, FinishReason.LENGTH if last else None

    def show(self, tokens: list[int], reason: FinishReason | None, drafted: int, accepted: int) -> Span:
        """Take what `cut` has left of a round, in the order of the rounds: up to a stop string, which ends it too."""
        kept = len(tokens)
        pushed = self._text.push(tokens[: kept - (reason is FinishReason.STOP)])
        if pushed.stop is not None:
            kept, reason = pushed.consumed, FinishReason.STOP
        if reason is not None:
            self.finish_reason = reason
        stats = self.stats
        stats.rounds += 1
        stats.drafted += drafted
        accepted = min(kept, accepted)
        stats.accepted += accepted
        if drafted:
            stats.note_accepted(accepted)
        stats.new_tokens += kept
        self._token_ids += tokens[:kept]
        self._shown.append(pushed.text)
        return Span(tokens[:kept], pushed.text)

    def preview(self, tokens: list[int]) -> str:
        """The text that is still to be shown if `tokens` are what comes, up to an end token or a stop string."""
        ends = self._request.eos_token_ids
        kept = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return self._text.preview(tokens[:kept])

    def finish(self) -> Span:
        """The text that was held back; it may complete a stop string after all."""
        text = self._text.finish()
        self._shown.append(text)
        if self._text.stopped is not None:
            self.finish_reason = FinishReason.STOP
        return Span([], text)

    def result(self) -> Generation:
        assert self.finish_reason is not None
        return Generation("".join(self._shown), self._token_ids, self.finish_reason, self.stats, self.logprobs)
