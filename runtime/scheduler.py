"""Serve many requests on one runtime: one thread runs passes, each over all running requests.

A request waits until the KV cache has room for its longest outcome. Its prompt is then computed in parts, one in every
pass, beside the decoding of the others. A plan of one branch serves one request at a time. Every request gets the
tokens that it would get alone.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import abc
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic, perf_counter

from outrider.plans.errors import BusyError, ClosedError, OutriderError, PlanError, RequestError
from outrider.plans.manifest import Geometry
from outrider.runtime.branch_request import MODES, Mode
from outrider.runtime.generation import FinishReason, Generation, GrowingGeneration, Span
from outrider.runtime.handle import Handle
from outrider.runtime.numbers import as_real, shown
from outrider.runtime.options.request import Request
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.sequence import CommittedTokens, Sequence
from outrider.runtime.stats import Stats
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.runtime.text.stream import TextStream

_LOG = logging.getLogger("outrider")
_IDLE = 10.0  # seconds after which the thread of a scheduler without work ends; the next request starts another


@dataclass(frozen=True)
class SchedulerConfig:
    """How requests are served.

    `max_running` at once (default: as many as the plan has branches), `max_waiting` before more are refused, and
    `max_waiting_per_client` of those of one client, where requests name theirs (default: all of them). At most
    `prefill_tokens` of prompts go into a pass in which others decode: what one may delay the others by (default: the
    plan's chunk). `mode` is that of branches (default: a row each, where the plan has them). With `overlap`, the text
    of a pass is made out, searched for stop strings and handed on while the next pass runs.
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
class Queue:
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
class _Queued:
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


class Scheduler:
    """Serves requests in a thread of its own, which runs while there is work. Any thread may call `submit`."""

    def __init__(self, pool: StepLoopPool, config: SchedulerConfig | None = None) -> None:
        """Borrow a step loop of the pool whenever there is work. Raises RequestError for what the plan cannot serve."""
        manifest = pool.loaded.manifest
        geometry = manifest.target
        self.config = config = config or SchedulerConfig()
        if (config.max_running or 0) > geometry.branches:
            raise RequestError(f"max_running is {config.max_running}; the plan serves at most {geometry.branches}.")
        if (config.prefill_tokens or 0) > geometry.prefill_chunk:
            raise RequestError(
                f"prefill_tokens is {config.prefill_tokens}; the plan's passes take at most {geometry.prefill_chunk}."
            )
        mode = config.mode_on(geometry)
        if mode == "batching" and geometry.rows < 2:
            raise RequestError("The plan has one row for all; build it with capacity.batching for mode batching.")
        self._pool, self._mode = pool, mode
        self._loop: StepLoop | None = None
        loop = pool.borrow()
        if geometry.branches > 1:
            loop.warm_up(mode)
        slots = loop.cache.capacity
        pool.give_back(loop)
        self._most = config.max_running or geometry.branches
        self._drafters: set[str | None] = {drafter.name for drafter in manifest.drafters}
        self._numbers = count()
        self._changed = threading.Condition()
        self._waiting: list[_Queued] = []
        # Start-time fair queuing (Goyal et al., 1996): the tokens that clients with a request here have been granted,
        # and the count of the client that started last: a client that returns starts from it.
        self._granted: dict[str | None, int] = {}
        self._level = 0
        self._running: list[Sequence] = []
        self._by_place: dict[int, _Queued] = {}
        self._stats = SchedulerStats(kv_slots=slots)
        self._showing: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        _SCHEDULERS.add(self)

    def submit(
        self,
        asked: abc.Sequence[Request],
        priority: int = 0,
        deadline: float | None = None,
        *,
        client: str | None = None,
        wait: bool = False,
    ) -> list[Handle]:
        """Submit requests: of a client, higher `priority` starts first, then earlier submissions; of several clients,
        who has been granted the fewest tokens.

        `deadline` is in seconds from now; what a request has by then is its result. `client` names the submitter. With
        `wait`, the call blocks until the queue has room. All requests are taken, or none. Raises BusyError where too
        many wait, ClosedError where the scheduler is closed, and PlanError where the plan was written over.
        """
        self._pool.loaded.files.check()
        until = None if deadline is None else monotonic() + deadline
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closed or self._queue(client).room >= len(asked))
            if self._closed:
                raise ClosedError("The runtime takes no more requests: it was closed.")
            try:
                self._queue(client).check(len(asked))
            except BusyError:
                self._stats.refused += len(asked)
                raise
            made = [self._made(each, -priority, until, client) for each in asked]
            self._enter(client)
            self._waiting += made
            self._stats.submitted += len(made)
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        return [request.handle for request in made]

    def _made(self, asked: Request, rank: int, until: float | None, client: str | None) -> _Queued:
        """Build the request, with an event of its own that ends it."""
        cancel, given = threading.Event(), asked.cancel

        def end() -> None:
            cancel.set()
            with self._changed:
                self._changed.notify_all()

        asked = replace(asked, cancel=cancel)
        place = rank, next(self._numbers)
        return _Queued(place, asked, Handle(end), perf_counter(), until, cancel, given, client)

    def _enter(self, client: str | None) -> None:
        """A client with no waiting request starts from the current level, without credit for its idle time."""
        waiting = {each.client for each in self._waiting}
        here = waiting | {each.client for each in self._by_place.values()}
        self._granted = {each: granted for each, granted in self._granted.items() if each in here}
        if client not in waiting:
            self._granted[client] = max(self._granted.get(client, 0), self._level)

    def _next(self) -> _Queued:
        """The waiting request that starts next: of the client that has been granted least, the first by its rank."""
        first = min(self._waiting, key=lambda each: (self._granted[each.client], each.place))
        return min((each for each in self._waiting if each.client == first.client), key=lambda each: each.rank)

    def _queue(self, client: str | None) -> Queue:
        own = sum(each.client == client for each in self._waiting)
        return Queue(self.config, len(self._waiting), own, self._most - len(self._by_place), self._most, client)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="outrider-scheduler", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> SchedulerStats:
        """A copy of the counts."""
        with self._changed:
            return replace(self._stats, waiting=len(self._waiting), running=len(self._by_place))

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests, and finish the present ones or, without `drain`, cancel them.

        Returns whether all were finished after at most `timeout` seconds.
        """
        with self._changed:
            self._closed = True
            if not drain:
                for request in [*self._waiting, *self._by_place.values()]:
                    request.cancel.set()
            self._changed.notify_all()
            if threading.current_thread() is self._thread:  # called by a rule of a request's: it would wait for itself
                return False
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    # In the thread.

    def _work(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="outrider-text") as texts:
            while self._wait():
                try:
                    self._turn(texts, self._take())
                except BaseException as error:  # exits and panics too: without the thread, nobody is served
                    _LOG.exception("a round of the scheduler failed")
                    reported = error if isinstance(error, OutriderError) else PlanError(f"A round failed: {error!r}.")
                    self._fail(reported, waiting=self._loop is None)
                    self._let_go()
            self._let_go()
        with self._changed:
            self._thread = None
            self._changed.notify_all()
            if self._waiting:  # one came while this thread was ending
                self._start()

    def _take(self) -> StepLoop:
        """Return the loop that serves the requests; borrow one if need be."""
        if self._loop is None:
            loop = self._pool.borrow()
            loop.begin([], self._drafters, self._mode)
            self._loop = loop
        return self._loop

    def _let_go(self) -> None:
        """Give the loop back to the pool."""
        if self._loop is not None:
            self._pool.give_back(self._loop)
            self._loop = None
            with self._changed:
                self._stats.kv_used = self._stats.kv_reserved = 0

    def _wait(self) -> bool:
        """Wait for work; return False when the thread should end."""
        with self._changed:
            while not (self._waiting or self._running):
                if self._closed or not self._changed.wait(_IDLE):
                    return bool(self._waiting)
            return True

    def _turn(self, texts: ThreadPoolExecutor, loop: StepLoop) -> None:
        """Run one pass, after dropping requests that expired while waiting and admitting those that fit.

        The text of the pass before is handled meanwhile. A sequence whose stop string is found there has taken part in
        this pass for nothing, and in the one that was launched after it.
        """
        self._expire()
        loop.settle(self._running)
        self._admit(loop)
        if not self._running:
            self._catch_up()
            self._note_kv(loop)
            return
        began = perf_counter()
        decoding = any(each.decoding for each in self._running)
        committed = loop.step(self._running, self.config.prefill_tokens if decoding else None)
        self._catch_up()
        committed = [each for each in committed if not each.sequence.generation.stopped]
        if self.config.overlap:
            with suppress(RuntimeError):  # the interpreter ends, and takes no more work
                self._showing = texts.submit(self._show, loop, committed)
        if self._showing is None:
            self._show(loop, committed)
        spent = (perf_counter() - began) * 1000
        with self._changed:
            stats = self._stats
            stats.rounds += 1
            stats.busy_ms += spent
            stats.longest_round_ms = max(stats.longest_round_ms, spent)
        self._note_kv(loop)

    def _note_kv(self, loop: StepLoop) -> None:
        """Note how full the KV cache is, in the thread that fills it: who reads the counts touches no step loop."""
        used, reserved = loop.cache.live, sum(each.generation.end for each in self._running)
        with self._changed:
            self._stats.kv_used, self._stats.kv_reserved = used, reserved

    def _show(self, loop: StepLoop, committed: abc.Sequence[CommittedTokens]) -> None:
        for each in committed:
            self._deliver(loop.show(each))

    def _catch_up(self) -> None:
        """Wait until all text has been handled."""
        showing, self._showing = self._showing, None
        if showing is not None:
            showing.result()

    def _expire(self) -> None:
        """End waiting requests that were cancelled or are past their deadline; cancel running ones past theirs."""
        with self._changed:
            over = [each for each in self._waiting if each.late or each.cancelled]
            if over:
                self._waiting = [each for each in self._waiting if each not in over]
            late = [each for each in self._by_place.values() if not each.cancelled and each.late]
            self._changed.notify_all()
        for each in over:
            reason = FinishReason.DEADLINE if each.late and not each.cancelled else FinishReason.CANCELLED
            each.queued_ms = (perf_counter() - each.submitted) * 1000
            self._end_unbegun(each, reason)
        for each in late:
            each.cancel.set()

    def _end_unbegun(self, request: _Queued, reason: FinishReason) -> None:
        """End a request that never ran, with the tokens that it has given elsewhere, if any."""
        asked, ids = request.asked, request.asked.token_ids
        stats = Stats(len(ids), total_ms=request.queued_ms, resumed_tokens=len(asked.generated))
        generation = GrowingGeneration(asked, TextStream(self._pool.loaded.tokenizer, ids, asked.stop), stats)
        generation.finish_reason = reason
        if held_back := generation.finish():
            request.handle.push(Span([], held_back))
        self._end(request, generation.result())

    def _admit(self, loop: StepLoop) -> None:
        """Start waiting requests in their order, while there are free places and room in the KV cache."""
        while len(self._running) < self._most:
            with self._changed:
                if not self._waiting:
                    return
                request = self._next()
                asked = request.asked
                if self._running and not loop.fits(len(asked.token_ids), asked):
                    return
                self._waiting.remove(request)
                self._level = self._granted[request.client]
                self._granted[request.client] += len(asked.token_ids) + asked.max_new_tokens
                self._by_place[request.place] = request
                self._changed.notify_all()
            request.queued_ms = (perf_counter() - request.submitted) * 1000
            self._running.append(loop.admit(request.place, request.asked.token_ids, request.asked))
            with self._changed:
                self._stats.queued_ms += request.queued_ms
                self._stats.prompt_tokens += len(request.asked.token_ids)

    def _deliver(self, span: Span) -> None:
        request = self._by_place[span.sequence]
        tokens = 0 if span.tentative else len(span.token_ids)
        with self._changed:
            self._stats.new_tokens += tokens
            if tokens and not request.begun:
                self._stats.ttft_ms += (perf_counter() - request.submitted) * 1000
        request.begun |= tokens > 0
        if span.token_ids or span.text:
            request.handle.push(span)
        if span.result is None and span.error is None:
            return
        result = span.result
        if result is not None and result.finish_reason is FinishReason.CANCELLED and request.late:
            result = replace(result, finish_reason=FinishReason.DEADLINE)
        self._end(request, result, span.error)

    def _end(self, request: _Queued, result: Generation | None, error: Exception | None = None) -> None:
        with self._changed:
            self._by_place.pop(request.place, None)
            self._stats.finished += 1
            self._stats.failed += error is not None
            if result is not None:
                result.stats.queued_ms = request.queued_ms
                self._stats.reused_tokens += result.stats.reused_tokens
                self._stats.drafted += result.stats.drafted
                self._stats.accepted += result.stats.accepted
                self._stats.note_drafts(result.stats.rounds_by_accepted)
        request.handle.end(result, error)

    def _fail(self, error: Exception, *, waiting: bool) -> None:
        """End the requests of a pass that has failed with its error; the others are served as before. Those that wait
        end too where no step loop can be had to serve them."""
        with suppress(BaseException):
            self._catch_up()
        if waiting:
            with self._changed:
                over, self._waiting = self._waiting, []
            for request in over:
                self._end(request, None, error)
        for request in list(self._by_place.values()):
            self._end(request, None, error)
        self._running.clear()


_SCHEDULERS: weakref.WeakSet[Scheduler] = weakref.WeakSet()


@atexit.register
def close_all() -> None:
    """Cancel all requests before the process ends: a thread that outlives the interpreter would hold on to buffers and
    loops."""
    for scheduler in list(_SCHEDULERS):
        scheduler.close(drain=False, timeout=10)
