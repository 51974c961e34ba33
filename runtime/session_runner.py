"""Requests one at a time, for a scheduler over a plan of one branch: each has a session while it runs.

A pass is one of the session's own, over a part of a prompt or of a round, so that all that a session does is done here
too: any acceptance, partial KV, chains of any length, the prefix cache, devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import RequestError
from runtime.branch_request import BranchRequest
from runtime.branch_stream import BranchSpan, BranchStats
from runtime.generation import Run, Span
from runtime.session_pool import SessionPool


@dataclass(eq=False)
class RunningSession:
    """The request that runs."""

    place: int
    run: Run
    over: bool = False
    decoding: bool = False  # nobody else's prompt could delay it
    stopped: bool = False  # a session looks at the text before the next pass


@dataclass(frozen=True)
class SessionPass:
    """What a pass has brought."""

    running: RunningSession
    span: BranchSpan


class SessionRunner:
    """Runs one request at a time on a session of the pool."""

    def __init__(self, sessions: SessionPool) -> None:
        self._sessions = sessions
        self._running: RunningSession | None = None

    def begin(self, prefix: Sequence[int], drafters: set[str | None]) -> bool:
        """Give back the session of a request that has not ended."""
        assert not prefix, "a session computes the whole of its prompt"
        if self._running is not None:
            self._running.run.close()
            self._running = None
        return True

    def fits(self, asked: BranchRequest) -> bool:
        """Whether nothing runs: a session has the room of one request, whatever that comes to."""
        return self._running is None

    def admit(self, place: int, asked: BranchRequest) -> RunningSession:
        """A request begins, at the next pass."""
        self._running = RunningSession(place, self._sessions.run(asked.token_ids, asked.request))
        return self._running

    def advance(self, running: list[RunningSession], stats: BranchStats, chunk: int | None = None) -> list[SessionPass]:
        """The session's next pass. `chunk` is of prompts beside which others decode: there are none."""
        self.settle(running)
        if not running:
            return []
        (each,) = running
        stats.most_alive = 1
        try:
            span = next(each.run)
        except StopIteration as end:
            each.over = True
            return [SessionPass(each, BranchSpan(each.place, Span([], ""), end.value))]
        except RequestError as error:  # such as a form that cannot go on
            each.over = True
            return [SessionPass(each, BranchSpan(each.place, Span([], ""), error=error))]
        if span is None:
            stats.rounds += 1
            return []
        stats.rounds += bool(span.token_ids)  # else it is text that was held back
        return [SessionPass(each, BranchSpan(each.place, span))]

    def show(self, committed: SessionPass) -> BranchSpan:
        """What the pass has brought."""
        return committed.span

    def settle(self, running: list[RunningSession]) -> None:
        """Let go of the request that is over."""
        if self._running is not None and self._running.over:
            running.remove(self._running)
            self._running = None
