"""A request that continues wherever a replica is: its spans gathered from one stream after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Protocol

from outrider.plans.errors import BusyError, OutriderError, RequestError, UnavailableError
from outrider.runtime.generation import FinishReason, Generation, Span
from outrider.runtime.handle import Handle
from outrider.runtime.options.options import Options
from outrider.runtime.sampling import TokenLogprob
from outrider.runtime.stats import Stats


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """Token ids of a prompt, and options that were checked where it came in.

    `deadline` is in seconds from the moment of sending. `identity` is that of the plan whose tokenizer and limits the
    request was checked with; a replica of another plan refuses it. `caller` is the actor that reads the answer.
    `kernels` are those that computed the tokens that it has given (`exactness.kernels_that_count`); a replica on a
    processor of another kind refuses it.
    """

    token_ids: list[int]
    options: Options
    identity: str
    priority: int = 0
    deadline: float | None = None
    client: str | None = None
    caller: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)

    def again(self, generated: Sequence[int], deadline: float | None, kernels: Mapping[str, str]) -> ReplicaRequest:
        """The same request, after tokens that it has given by those `kernels`, with `deadline` seconds left."""
        if not generated:
            return replace(self, deadline=deadline)
        options = Options(**{**self.options, "generated": list(generated)})
        return replace(self, options=options, deadline=deadline, kernels=kernels)

    @property
    def owner(self) -> str:
        """Whose requests find what a replica keeps of it."""
        return self.options.get("cache_salt") or ""

    @property
    def path(self) -> list[int]:
        """All tokens that a replica computes, or finds, before the next one."""
        return [*self.token_ids, *(self.options.get("generated") or ())]


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A replica's first message: it has taken the request, whose tokens come of these `kernels`."""

    kernels: Mapping[str, str] = field(default_factory=dict)


_LOG = logging.getLogger("outrider")
# Seconds after its deadline that a request waits for its replica to end it: one that took it late is later.
_LATE = 0.2
_EARLY = 0.05  # seconds: timers may ring a little before their time
_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between two tries


class LostError(Exception):
    """The replica that served a request is gone, or cannot be reached."""


Message = Acknowledgement | list[Span]
"""What comes from a replica: first that it has taken the request, then its spans."""


class ReplicaStream(Protocol):
    """The messages of one replica about a request."""

    def __aiter__(self) -> AsyncIterator[Message]:
        """Raises LostError where the replica is lost, and the OutriderError that ended the request there."""
        ...

    def cancel(self) -> None:
        """End the request on the replica at once; nothing where it is over."""


Send = Callable[[ReplicaRequest], ReplicaStream]


@dataclass(frozen=True)
class Failover:
    """How long a request is kept alive: it may lose `losses` replicas, and wait `patience` seconds for one."""

    losses: int = 5
    patience: float = 120.0


class FollowedRequest:
    """A request, and what it has given: by whichever replica."""

    def __init__(self, sent: ReplicaRequest, handle: Handle, *, stays: str | None = None) -> None:
        """`stays` says why the request cannot continue elsewhere once it has given tokens; None where it can."""
        self.handle = handle
        self.client = sent.client
        self._sent, self._stays = sent, stays
        self._submitted = monotonic()
        self._until = None if sent.deadline is None else self._submitted + sent.deadline
        self._taken: float | None = None  # when a replica first took it
        self._takers = 0
        self._kernels: Mapping[str, str] = {}  # that its tokens come of
        self.waits = True  # no replica has it
        self._first: float | None = None  # when its first token came
        self._last = self._submitted  # when its last one came
        self._first_span = 0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    async def run(self, send: Send, failover: Failover) -> None:
        """Follow the request to its end, from replica to replica; its handle gets all spans, and result or error."""
        losses, waited, began = 0, _SHORTEST, monotonic()
        while True:
            before = len(self._tokens)
            try:
                return await self._follow(send, began + failover.patience)
            except TimeoutError:
                if self._until is not None and self._until - monotonic() < _EARLY:
                    return self.cut_off(FinishReason.DEADLINE)
                return self._fail(f"No replica has taken the request in {failover.patience:g} s.")
            except RequestError as error:
                return self.handle.end(None, error)
            except BusyError as busy:  # or closed: it is ending, or serves another plan
                if monotonic() - began >= failover.patience:
                    return self._fail(f"No replica has taken the request in {failover.patience:g} s: {busy}")
            except (LostError, OutriderError) as lost:
                losses, began = losses + 1, monotonic()
                _LOG.warning("a request lost its replica after %d tokens: %s", len(self._tokens), lost)
                if self._tokens and self._stays is not None:
                    return self._fail(f"The answer lost its replica after {len(self._tokens)} tokens: {self._stays}")
                if losses > failover.losses:
                    return self._fail(f"The request lost {losses} replicas, the last one as {lost}.")
            waited = _SHORTEST if len(self._tokens) > before else min(2 * waited, _LONGEST)
            left = self._left()
            await asyncio.sleep(waited if left is None else min(waited, left))
            if left == 0:
                return self.cut_off(FinishReason.DEADLINE)

    def cut_off(self, reason: FinishReason) -> None:
        """End the request with what it has."""
        stats = self._clocked(Stats(prompt_tokens=len(self._sent.token_ids), new_tokens=len(self._tokens)))
        text, seed = "".join(self._texts), self._sent.options.get("seed") or 0
        self.handle.end(Generation(text, self._tokens, reason, stats, self._logprobs, seed))

    def _left(self) -> float | None:
        """Seconds up to the deadline, 0 after it."""
        return None if self._until is None else max(0.0, self._until - monotonic())

    def _fail(self, message: str) -> None:
        self.handle.end(None, UnavailableError(f"{message} Send the request again."))

    async def _follow(self, send: Send, patience: float) -> None:
        """Follow the request on one replica, which is to take it before `patience`.

        Raises LostError, TimeoutError, and the OutriderError that ended it.
        """
        stream = send(self._sent.again(self._tokens, self._left(), self._kernels))
        given = list(self._logprobs)
        try:
            async with asyncio.timeout_at(_loop_time(min(patience, self._until or inf))) as waiting:
                async for message in stream:
                    if isinstance(message, Acknowledgement):
                        self._takers, self._kernels, self.waits = self._takers + 1, message.kernels, False
                        self._taken = monotonic() if self._taken is None else self._taken
                        waiting.reschedule(None if self._until is None else _loop_time(self._until + _LATE))
                        continue
                    for span in message:
                        self._take(span, given)
                    if self.handle.done:
                        return
            raise LostError("its stream ended before the request did")
        finally:
            self.waits = True
            stream.cancel()

    def _take(self, span: Span, given: list[TokenLogprob]) -> None:
        """Hand a span on. `given` are log-probabilities from before the replica that sends it. Raises LostError."""
        result, span.result = span.result, None
        if result is not None and result.finish_reason is FinishReason.CANCELLED:
            # Nobody asked for that: whose request ends follows it no more. The text of its last span is what the
            # replica held back, and the next one holds it back too.
            raise LostError("it cut the request off")
        if not span.tentative:
            self._tokens += span.token_ids
            self._texts.append(span.text)
            self._logprobs += span.logprobs
            if span.token_ids:
                self._last = monotonic()
            if self._first is None and span.token_ids:
                self._first, self._first_span = self._last, len(span.token_ids)
        if span.token_ids or span.text:
            self.handle.push(span)
        if result is not None:
            self.handle.end(self._timed(replace(result, logprobs=[*given, *result.logprobs])))

    def _timed(self, found: Generation) -> Generation:
        """The generation as its client saw it: all its tokens, and the wait for the first of them from here."""
        reused = min(found.stats.reused_tokens, found.stats.prompt_tokens)
        stats = replace(found.stats, new_tokens=len(found.token_ids), reused_tokens=reused)
        if self._takers > 1:  # the last replica knows the end alone
            stats = self._clocked(stats)
        elif self._first is not None:
            stats.queued_ms = max(0.0, 1000 * (self._first - self._submitted) - stats.ttft_ms)
        return replace(found, stats=stats)

    def _clocked(self, stats: Stats) -> Stats:
        """The same counts with times by the clock of here: work is taken to begin when a replica takes the request."""
        now = monotonic()
        taken = now if self._taken is None else self._taken
        return replace(
            stats,
            queued_ms=1000 * (taken - self._submitted),
            ttft_ms=0.0 if self._first is None else 1000 * (self._first - taken),
            total_ms=1000 * ((now if self._first is None else self._last) - taken),
            first_span=self._first_span,
        )


def _loop_time(moment: float) -> float | None:
    """A moment of the monotonic clock on that of the running loop; None for never."""
    return None if moment == inf else asyncio.get_running_loop().time() + moment - monotonic()
