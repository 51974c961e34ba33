"""Requests that wait to be served: who may wait, and who starts next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from time import monotonic

from outrider.plans.errors import BusyError, RequestError
from outrider.plans.manifest import Geometry
from outrider.runtime.branch_request import MODES, Mode
from outrider.runtime.handle import Handle
from outrider.runtime.numbers import as_real, shown
from outrider.runtime.options.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests are served.

    `max_running` at once (default: as many as the plan has branches), `max_waiting` before more are refused, and
    `max_waiting_per_client` of those of one client, where requests name theirs (default: all of them). At most
    `prefill_tokens` of prompts go into a pass in which others decode: what one may delay the others by (default: the
    plan's chunk). `mode` is that of branches (default: a row each, where the plan has them). With `overlap`, the text
    of a pass is decoded, searched for stop strings and delivered while the next pass runs.
    """

    max_running: int | None = None
    max_waiting: int = 1024
    prefill_tokens: int | None = None
    mode: Mode | None = None
    overlap: bool = True
    max_waiting_per_client: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "prefill_tokens", "max_waiting_per_client"):
            value, optional = getattr(self, name), name != "max_waiting"
            if (value is None and optional) or (type(value) is int and value >= 1):
                continue
            raise RequestError(f"{name} is {value!r}; pass a whole number of at least 1.")
        if self.mode is not None and self.mode not in MODES:
            raise RequestError(f"mode is {self.mode!r}; choose one of {', '.join(MODES)}.")
        if not isinstance(self.overlap, bool):
            raise RequestError(f"overlap is {self.overlap!r}; pass True or False.")

    def mode_on(self, target: Geometry) -> Mode:
        """Return how sequences of a plan lie in the KV cache."""
        return self.mode or ("batching" if target.rows > 1 else "in-one-sequence")


def check_place_in_queue(priority: object, deadline: object) -> None:
    """Raise RequestError for a priority that is no whole number, and a deadline that is no time to come."""
    if type(priority) is not int:
        raise RequestError(f"priority is {shown(priority)}; pass a whole number, 0 for the usual one.")
    if deadline is not None and ((seconds := as_real(deadline)) is None or seconds <= 0):
        raise RequestError(f"deadline is {shown(deadline)}; pass seconds from now, more than 0.")


@dataclass(frozen=True)
class QueueRoom:
    """Who waits: `waiting` requests, `own` of them those of the client that asks; `free` of `places` can begin."""

    config: SchedulerConfig
    waiting: int
    own: int
    free: int
    places: int
    client: str | None

    @property
    def _share(self) -> int:
        """How many requests of the client may wait."""
        most, share = self.config.max_waiting, self.config.max_waiting_per_client
        return most if self.client is None or share is None else min(most, share)

    @property
    def room(self) -> int:
        """How many more are taken: those that can begin, and those that may wait."""
        return min(self.config.max_waiting - self.waiting, self._share - self.own) + self.free

    def check(self, count: int) -> None:
        """Raise RequestError for more than can be taken at once, and BusyError for more than are taken now."""
        if count > (most := self._share + self.places):
            raise RequestError(f"{count} requests are made at once, and at most {most} can be; make fewer at a time.")
        if count > self.config.max_waiting - self.waiting + self.free:
            raise BusyError(
                f"The queue is full: {self.waiting} requests wait already, and {count} more are not taken now. "
                "Try again later."
            )
        if count > self.room:
            raise BusyError(
                f"Too many requests of this client wait: {self.own} already, and its share of the queue is "
                f"{self._share}; {count} more are not taken now. Try again later."
            )


@dataclass(eq=False)
class QueuedRequest:
    """A submitted request; those of one client start in the order of their ranks."""

    rank: tuple[int, int]
    asked: Request
    handle: Handle
    submitted: float
    deadline: float | None
    cancel: threading.Event  # the request's own; the caller's event sets it too
    given: threading.Event | None
    client: str | None = None
    begun: bool = False  # whether its first tokens have been delivered
    queued_ms: float = 0.0

    @property
    def place(self) -> int:
        """The request's own number."""
        return self.rank[1]

    @property
    def cancelled(self) -> bool:
        if self.given is not None and self.given.is_set():
            self.cancel.set()
        return self.cancel.is_set()

    @property
    def late(self) -> bool:
        return self.deadline is not None and monotonic() >= self.deadline


class RequestQueue:
    """The requests that wait. Start-time fair queuing (Goyal et al., 1996) chooses among clients.

    Not safe under threads: its owner holds a lock.
    """

    def __init__(self, config: SchedulerConfig, places: int) -> None:
        """`places` is how many requests run at once."""
        self.waiting: list[QueuedRequest] = []
        self._config, self._places = config, places
        # The tokens that clients with a request here have been granted, and the count of the client that started last:
        # a client that returns starts from it, without credit for its idle time.
        self._granted: dict[str | None, int] = {}
        self._level = 0

    def room(self, client: str | None, running: int) -> QueueRoom:
        own = sum(each.client == client for each in self.waiting)
        return QueueRoom(self._config, len(self.waiting), own, self._places - running, self._places, client)

    def add(self, made: list[QueuedRequest], client: str | None, running: Collection[QueuedRequest]) -> None:
        """Have a client's requests wait; beside them the `running` ones keep their clients' counts."""
        waiting = {each.client for each in self.waiting}
        here = waiting | {each.client for each in running}
        self._granted = {each: granted for each, granted in self._granted.items() if each in here}
        if client not in waiting:
            self._granted[client] = max(self._granted.get(client, 0), self._level)
        self.waiting += made

    def next(self) -> QueuedRequest:
        """The request that starts next: of the client that has been granted least, the first by its rank."""
        first = min(self.waiting, key=lambda each: (self._granted[each.client], each.place))
        return min((each for each in self.waiting if each.client == first.client), key=lambda each: each.rank)

    def start(self, request: QueuedRequest) -> None:
        """Take out a request that starts now."""
        self.waiting.remove(request)
        self._level = self._granted[request.client]
        self._granted[request.client] += len(request.asked.token_ids) + request.asked.max_new_tokens

    def remove_over(self) -> list[QueuedRequest]:
        """Take out those that were cancelled, or are past their deadline."""
        over = [each for each in self.waiting if each.late or each.cancelled]
        if over:
            self.waiting = [each for each in self.waiting if each not in over]
        return over

    def clear(self) -> list[QueuedRequest]:
        waiting, self.waiting = self.waiting, []
        return waiting
