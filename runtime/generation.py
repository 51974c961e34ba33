"""What a generation gives back: spans as they are committed, and the whole at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from runtime.sampling import TokenLogprob
from runtime.stats import Stats


class FinishReason(StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Span:
    """What one step committed. `text` holds whole characters only and may lag behind `token_ids`."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class Generation:
    """A finished generation. `token_ids` ends with the end token, if one ended it; `text` leaves it out."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprob] = field(default_factory=list)


class GenerationStream:
    """Iterate for spans; `result` is the whole generation once iteration has ended.

    Closing it, or leaving it unfinished, ends the generation; the session keeps what was committed.
    """

    def __init__(self, run: Generator[Span, None, Generation]) -> None:
        self._run = run
        self._result: Generation | None = None
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Span]:
        return self

    def __next__(self) -> Span:
        try:
            return next(self._run)
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
