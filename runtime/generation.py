"""Results of a generation: spans as tokens are committed, and the whole at the end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter

from outrider.plans.errors import OpError, RequestError
from outrider.runtime.options.request import Request
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.stats import Stats
from outrider.runtime.text.rules import LogitsRule
from outrider.runtime.text.stream import TextStream


class FinishReason(StrEnum):
    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the request's deadline has passed


@dataclass(frozen=True)
class Generation:
    """A finished generation. `token_ids` ends with the end token, if one ended it; `text` leaves it out.

    With `seed`, the same request has the same tokens again.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seed: int = 0


@dataclass(slots=True)
class Span:
    """Tokens that one step committed to a sequence. `text` holds whole characters only and may come later than
    `token_ids`.

    A `tentative` span is not committed, and may never be. Its tokens follow those of earlier tentative spans. Its text
    is what will be shown after the text so far if all tentative tokens are confirmed and nothing follows. The next
    span that is not tentative replaces it.

    `sequence` is the index of the sequence among those asked for. The last span of a sequence carries its `result`, or
    the `error` that ended it, which a stream raises.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tentative: bool = False
    sequence: int = 0
    result: Generation | None = None
    error: RequestError | OpError | None = None


Run = Generator[Span | None, None, None]
"""Generations pass by pass: their spans, or None after a pass over a part of a prompt alone."""


class Stream:
    """Iterate for spans; `result` (`results`, of several sequences) is there once the iteration has ended.

    Closing it, or leaving it unfinished, ends the run; a session keeps what was committed.
    """

    def __init__(self, run: Run, stats: Stats | None = None) -> None:
        """`stats` are those of a run of several sequences; the run's time is added to them here."""
        self._run, self._stats = run, stats
        self._found: dict[int, Generation] = {}
        self._ended = False
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Span]:
        return self

    def __next__(self) -> Span:
        started = perf_counter()
        try:
            while (span := next(self._run)) is None:
                pass
        except StopIteration:
            self._ended = self._ended or len(self._found) == (1 if self._stats is None else self._stats.sequences)
            raise
        except Exception as error:
            self._error = error
            raise
        finally:
            if self._stats is not None:
                self._stats.total_ms += (perf_counter() - started) * 1000
        if span.result is not None:
            self._found[span.sequence] = span.result
        return span

    def close(self) -> None:
        self._run.close()

    @property
    def results(self) -> list[Generation]:
        """The generations in the order asked for; runs them to their ends first, if need be."""
        for _ in self:
            pass
        if not self._ended:
            how = "failed" if self._error is not None else "was closed"
            raise RuntimeError(f"The stream {how} before its end; it has no result.") from self._error
        return [self._found[place] for place in sorted(self._found)]

    @property
    def result(self) -> Generation:
        """The generation of the only sequence; runs it to its end first, if need be."""
        (result,) = self.results
        return result

    @property
    def stats(self) -> Stats:
        """Statistics of all sequences together; for a single sequence, once it has ended."""
        return self.result.stats if self._stats is None else self._stats


class GrowingGeneration:
    """A generation in progress: what has been committed, and whether it has ended.

    `reason` is why its tokens end, `finish_reason` why its text does, which may be seen later; `stuck` is why no token
    may follow, which the next step reports, `error` why it cannot continue.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream,
        stats: Stats,
        rules: Sequence[LogitsRule] = (),
        end: int = 0,
        began: float = 0.0,
    ) -> None:
        """`end` is the most tokens that the sequence may come to, `began` is in seconds of the step loop's clock."""
        self.request, self._text, self.stats, self.rules = request, text, stats, rules
        self.prompted, self.end, self.began = stats.prompt_tokens, end, began
        self.rounds = 0  # that have committed something
        self.reason: FinishReason | None = None
        self.stopped = False  # whether its text has ended
        self.stuck: RequestError | None = None
        self.error: RequestError | OpError | None = None
        self.inserted = False  # whether the prefix cache has its beginning
        self.watched = False  # somebody has asked for the logits of one of its tokens
        text.least = request.min_tokens
        self._token_ids = list(request.generated)
        self._shown = [text.push(self._token_ids).text]
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None

    def cut(self, chosen: list[int], last: bool) -> tuple[list[int], FinishReason | None]:
        """Cut the tokens that the target chose in one round after an end token.

        `last` says that there is no room for more. Returns the tokens that stay, and the finish reason as far as tokens
        decide it. Changes nothing.
        """
        ends = self.request.eos_token_ids
        if ends.isdisjoint(chosen):
            return chosen, FinishReason.LENGTH if last else None
        kept = next(index for index, token in enumerate(chosen) if token in ends) + 1
        return chosen[:kept], FinishReason.STOP

    def show(self, tokens: list[int], reason: FinishReason | None, drafted: int, accepted: int) -> tuple[int, str]:
        """Append the tokens that `cut` has left of a round, up to a stop string, which ends the generation too.

        Rounds must come in order. Returns the number of tokens that stay, and the text that they add.
        """
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
        return kept, pushed.text

    def preview(self, tokens: list[int]) -> str:
        """Return the text that would still be shown if `tokens` came next, up to an end token or a stop string."""
        ends = self.request.eos_token_ids
        kept = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        return self._text.preview(tokens[:kept])

    def finish(self) -> str:
        """Return the text that was held back; it may complete a stop string after all."""
        text = self._text.finish()
        self._shown.append(text)
        if self._text.stopped is not None:
            self.finish_reason = FinishReason.STOP
        return text

    def result(self) -> Generation:
        assert self.finish_reason is not None
        text, seed = "".join(self._shown), self.request.sampling.seed
        return Generation(text, self._token_ids, self.finish_reason, self.stats, self.logprobs, seed)
