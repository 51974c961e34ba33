"""What the server needs of a runtime, had of replicas elsewhere: no weights here."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from operator import add
from os import PathLike
from time import monotonic
from typing import Any

from outrider.plans.errors import BusyError, ClosedError, RequestError
from outrider.plans.manifest import Manifest, rejects
from outrider.plans.plan import Plan
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.branch_request import RequestChecks
from outrider.runtime.generation import FinishReason
from outrider.runtime.handle import Handle
from outrider.runtime.options.options import Options
from outrider.runtime.options.request import Request
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.ray_serve.following import Failover, FollowedRequest, ReplicaRequest, Send
from outrider.runtime.request_queue import QueueRoom, SchedulerConfig, check_place_in_queue
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.text.grammars import Grammars


class RemoteRuntime:
    """A `server.served.ServedRuntime`. Requests are checked here, and followed from replica to replica to their ends.

    `submit_all` may be called in any thread; what it starts runs in the event loop that the object was made in. Safe
    to use from several threads.
    """

    def __init__(
        self,
        plan: Plan,
        send: Send,
        config: SchedulerConfig,
        failover: Failover | None = None,
        caller: str | None = None,
    ) -> None:
        """`send` sends a request to a replica.

        Of `config`, `max_running` are the requests that all replicas are taken to run at once, or None where that is
        not known, and the limits on who waits hold for what waits here.

        `caller` is the actor that the object is in, if it is in one: with it, what it has asked for ends.
        """
        target = plan.manifest.target
        self.tokenizer = Tokenizer.load(plan.root / "tokenizer", plan.manifest.text.special_tokens)
        self.grammars = Grammars(self.tokenizer, target.vocab_size)
        self._checks = RequestChecks(plan.manifest, self.grammars, self.tokenizer)
        self.prefix_cache: PrefixCache | None = None  # each replica has its own
        self.counts = Counts()
        self._plan, self._send, self._config, self._failover = plan, send, config, failover or Failover()
        self._caller = caller
        self._loop = asyncio.get_running_loop()
        self._changed = threading.Condition()
        self._followed: dict[FollowedRequest, asyncio.Task[None] | None] = {}
        self._refused = 0
        self._closed = False

    @property
    def manifest(self) -> Manifest:
        return self._plan.manifest

    @property
    def scheduler_stats(self) -> SchedulerStats:
        """The last counts of all replicas together, and of requests that wait, or were refused, here."""
        total = self.counts.total
        with self._changed:
            waiting, refused = sum(each.waits for each in self._followed), self._refused
        return replace(total, waiting=total.waiting + waiting, refused=total.refused + refused)

    def submit_all(
        self,
        asked: Sequence[tuple[str | Sequence[int], Options]],
        *,
        priority: int = 0,
        deadline: float | None = None,
        client: str | None = None,
    ) -> list[Handle]:
        """Submit several prompts, each with options of its own, all of them or none; see `Runtime.submit`."""
        check_place_in_queue(priority, deadline)
        made = [self._made(*each, priority, deadline, client) for each in asked]
        with self._changed:
            if self._closed:
                raise ClosedError("The server takes no more requests: it was closed.")
            try:
                self._queue(client).check(len(made))
            except BusyError:
                self._refused += len(made)
                raise
            self._followed |= dict.fromkeys(made)
            for followed in made:  # here, so that `close` finds them started
                # In a context of its own: Ray would take requests of one context for one, and route them together.
                self._loop.call_soon_threadsafe(self._start, followed, context=contextvars.Context())
        return [followed.handle for followed in made]

    def _made(
        self, prompt: str | Sequence[int], options: Options, priority: int, deadline: float | None, client: str | None
    ) -> FollowedRequest:
        """Check a request. Raises RequestError as `Runtime.submit` does."""
        checked = self._checks.alone(prompt, options)
        options = Options(**{**options, "seed": checked.sampling.seed})  # the same wherever it continues
        sent = ReplicaRequest(
            list(checked.token_ids), options, self.manifest.identity, priority, deadline, client, self._caller
        )
        followed = FollowedRequest(sent, Handle(lambda: self._cancel(followed)), stays=self._why_it_stays(checked))
        return followed

    def _why_it_stays(self, request: Request) -> str | None:
        """Why a request cannot continue elsewhere, after what it has given; None where it can."""
        drafter = next((each for each in self.manifest.drafters if each.name == request.drafter), None)
        if drafter is not None and rejects([drafter]):
            who = f"those of the drafter {drafter.name!r}, which is accepted by rejection,"
        elif request.partial_kv == "lossy":
            who = "those of lossy partial KV"
        else:
            return None
        return f"no other can continue with its tokens, as {who} depend on where rounds end."

    def _queue(self, client: str | None) -> QueueRoom:
        """As a scheduler's: who finds a free place does not count as waiting."""
        waiting, places = [each for each in self._followed if each.waits], self._config.max_running or 0
        free = max(0, places - (len(self._followed) - len(waiting)))
        own = sum(each.client == client for each in waiting)
        return QueueRoom(self._config, len(waiting), own, free, places, client)

    def _start(self, followed: FollowedRequest) -> None:
        task = self._loop.create_task(followed.run(self._send, self._failover))
        self._followed[followed] = task
        task.add_done_callback(lambda _: self._forget(followed))

    def _forget(self, followed: FollowedRequest) -> None:
        task = self._followed[followed]
        assert task is not None
        if not task.cancelled() and (error := task.exception()) is not None:  # a fault of ours: nobody waits for ever
            followed.handle.end(None, error if isinstance(error, Exception) else RuntimeError(str(error)))
        elif not followed.handle.done:
            followed.cut_off(FinishReason.CANCELLED)
        with self._changed:
            del self._followed[followed]
            self._changed.notify_all()

    def _cancel(self, followed: FollowedRequest) -> None:
        """Cancel a request, from any thread."""
        if not followed.handle.done:
            self._loop.call_soon_threadsafe(self._cancel_task, followed)

    def _cancel_task(self, followed: FollowedRequest) -> None:
        task = self._followed.get(followed)
        if task is not None:
            task.cancel()

    def save_prefix_cache(self, path: str | PathLike[str]) -> int:
        """Raises RequestError: the caches are the replicas'."""
        raise RequestError(f"Nothing is saved to {path}: prefix caches are those of replicas, and end with them.")

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests, and finish the present ones or, without `drain`, cancel them.

        Not for the event loop's own thread. Returns whether all were finished after at most `timeout` seconds.
        """
        until = None if timeout is None else monotonic() + timeout
        with self._changed:
            self._closed = True
            present = list(self._followed)
        if not drain:
            for followed in present:
                self._cancel(followed)
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._followed, None if until is None else max(0.0, until - monotonic())
            )


_FORGOTTEN = 300  # answers of others that a replica misses until it is taken for gone: ten minutes, as ingresses ask


class Counts:
    """Counts of each replica, updated now and then; of `total` only those of present requests ever fall."""

    def __init__(self) -> None:
        self._last: dict[str, SchedulerStats] = {}  # by replica
        self._missed: dict[str, int] = {}  # how often each has not answered, one time after another
        self._gone = SchedulerStats()  # of those that are gone: names are never used again
        self.total = SchedulerStats()

    def update(self, found: Mapping[str, SchedulerStats]) -> None:
        """Set the counts of the replicas that answer. Of others the last ones stay, as if nothing ran there."""
        self._missed = {name: missed + 1 for name, missed in self._missed.items()} | dict.fromkeys(found, 0)
        self._last |= {name: _at_rest(stats) for name, stats in self._last.items() if name not in found} | dict(found)
        for name in [name for name, missed in self._missed.items() if missed > _FORGOTTEN]:
            self._gone = _together([self._gone, self._last.pop(name)])
            del self._missed[name]
        self.total = _together([self._gone, *self._last.values()])


def _at_rest(stats: SchedulerStats) -> SchedulerStats:
    """What stays of a replica's counts: not those of what it had at the moment."""
    return replace(stats, waiting=0, running=0, kv_slots=0, kv_used=0, kv_reserved=0)


def _by_place(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(first, second, fillvalue=0)))


_WAYS: dict[str, Callable[[Any, Any], Any]] = {"longest_round_ms": max, "accepted_by_depth": _by_place}
"""How counts of two replicas become one, where they are not added."""


def _together(several: Iterable[SchedulerStats]) -> SchedulerStats:
    total = SchedulerStats()
    for each in several:
        for name in (field.name for field in fields(each)):
            mine, other = getattr(total, name), getattr(each, name)
            setattr(total, name, _WAYS.get(name, add)(mine, other))
    return total
