"""A replica: one runtime that serves what an ingress sends it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Any

import ray
from ray import serve

from outrider.plans.backends import BACKENDS
from outrider.plans.errors import ClosedError, OutriderError, PlanError
from outrider.runtime.backends import device_of
from outrider.runtime.exactness import foreign_kernels, kernels_that_count
from outrider.runtime.generation import Span
from outrider.runtime.handle import Handle
from outrider.runtime.ray_serve.following import Acknowledgement, Message, ReplicaRequest
from outrider.runtime.ray_serve.router import BLOCKS, KERNELS, PrefixIndex
from outrider.runtime.ray_serve.settings import Settings
from outrider.runtime.runtime import Runtime
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.server.readiness import warm_up
from outrider.runtime.server.served import CUTTING_SECONDS

_APART = 0.01  # seconds between two messages of a request: of fast models, several passes share one
_REPORTED = 2048  # blocks, the latest, that are reported to routers
_STUCK = 120.0  # seconds without a pass, while requests run, after which a replica is taken for dead


@dataclass(frozen=True)
class ReplicaInfo:
    """Which process a replica is, and what it does.

    `host` is its machine, `node` that machine's number in Ray; its tokens may depend on `kernels`.
    """

    replica: str
    pid: int
    host: str
    node: str
    stats: SchedulerStats
    kernels: Mapping[str, str] = field(default_factory=dict)


class Replica:
    """A plan in memory. Ray makes one in a process of its own, and calls its methods in one event loop."""

    def __init__(self, settings: Settings, identity: str) -> None:
        """Load the plan, and warm it up. Raises PlanError where the folder holds another one than `identity` by now."""
        self._runtime = Runtime.load(
            settings.plan,
            backend=settings.backend,
            threads=settings.threads,
            cuda_graphs=settings.cuda_graphs,
            exactness=settings.exactness,
            prefix_cache=settings.cache_config,
            scheduler=settings.scheduler_config,
            share_memory=settings.most_replicas > 1,
        )
        self._identity, found = identity, self._runtime.manifest.identity
        if found != identity:
            raise PlanError(
                f"{settings.plan} holds the plan {found[:12]}, and {identity[:12]} is served; deploy the application "
                "again to serve the new one."
            )
        self._runtime.start()
        warm_up(self._runtime)
        backend = self._runtime.backend
        self._kernels = {"backend": backend} | kernels_that_count(self._runtime.manifest, backend)
        if not BACKENDS[backend].on_processor:
            self._kernels["device"] = device_of(backend)
        self._callers = Callers()
        self._held: PrefixIndex[str] | None = PrefixIndex(capacity=_REPORTED) if settings.ingresses > 1 else None
        self._seen, self._since = -1, monotonic()  # passes at the last look, and when there were more

    async def generate(self, sent: ReplicaRequest) -> AsyncIterator[Message]:
        """That the request is taken, and spans as they come; the last has the result.

        Raises the error that ended the request, and ClosedError for requests of another plan, and for those that have
        tokens of other kernels. Closing the generator cancels the request.
        """
        if sent.identity != self._identity:
            raise ClosedError("This replica serves another plan than the request was checked for.")
        if foreign := foreign_kernels(self._kernels, sent.kernels):
            raise ClosedError(f"This replica would continue with other tokens: its machine has {foreign}.")
        handle = await self._submit(sent)
        try:
            with self._callers.serving(sent.caller, handle):
                yield Acknowledgement(self._kernels)
                async for spans in _messages(handle):
                    yield spans
            if self._held is not None:
                self._held.insert([*sent.token_ids, *handle.result().token_ids], "here", sent.owner)
        finally:
            handle.cancel()

    async def _submit(self, sent: ReplicaRequest) -> Handle:
        """Submit, in a thread, as a grammar may have to be compiled."""
        own: dict[str, Any] = {"priority": sent.priority, "deadline": sent.deadline, "client": sent.client}
        submitting = asyncio.ensure_future(
            asyncio.to_thread(self._runtime.submit, sent.token_ids, **own, **sent.options)
        )
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_what_came_of)
            raise

    def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray's controller every now and then, for the routers of all ingresses."""
        known: dict[str, Any] = {KERNELS: self._kernels}
        return known if self._held is None else known | {BLOCKS: self._held.blocks}

    async def about(self) -> ReplicaInfo:
        """Which process this is, and its counts."""
        name, node = serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().get_node_id()
        return ReplicaInfo(name, os.getpid(), socket.gethostname(), node, self._runtime.scheduler_stats, self._kernels)

    def check_health(self) -> None:
        """Called by Ray's controller, which replaces a replica that raises: as where its plan was written over."""
        self._runtime.loaded.files.check()
        stats = self._runtime.scheduler_stats
        if stats.rounds != self._seen or not stats.running:
            self._seen, self._since = stats.rounds, monotonic()
        elif monotonic() - self._since > _STUCK:
            raise OutriderError(f"{stats.running} requests run, and no pass has ended for {_STUCK:g} s.")

    def __del__(self) -> None:
        """Called by Ray once the replica is drained; what still runs is cut off."""
        if hasattr(self, "_runtime"):
            self._runtime.close(drain=False, timeout=CUTTING_SECONDS)


async def _messages(handle: Handle) -> AsyncIterator[list[Span]]:
    """Spans of a handle, in messages that are as far apart as they are to be."""
    came: asyncio.Queue[Span | Exception] = asyncio.Queue()
    following = asyncio.create_task(_follow(handle, came))
    try:
        last, ended = -inf, False
        while not ended:
            some = [await came.get()]
            await asyncio.sleep(max(0.0, last + _APART - monotonic()))
            while not came.empty():
                some.append(came.get_nowait())
            last, spans = monotonic(), joined(some)
            yield spans
            if isinstance(some[-1], Exception):
                raise some[-1]
            ended = spans[-1].result is not None
    finally:
        following.cancel()


async def _follow(handle: Handle, came: asyncio.Queue[Span | Exception]) -> None:
    """Put a handle's spans into a queue, the last one with the result; or the error that ended the request."""
    last = Span([], "")
    try:
        async for span in handle:
            if span.result is None:
                came.put_nowait(span)
            else:
                last = span
        came.put_nowait(replace(last, result=await handle))
    except Exception as error:
        came.put_nowait(error)


def joined(some: Iterable[Span | Exception]) -> list[Span]:
    """The spans among `some`, as few as can be: those that are not tentative, one after another, become one."""
    found: list[Span] = []
    for span in some:
        if isinstance(span, Exception):
            continue
        if found and not span.tentative and not found[-1].tentative:
            before = found[-1]
            found[-1] = Span(
                before.token_ids + span.token_ids,
                before.text + span.text,
                before.logprobs + span.logprobs,
                result=span.result,
            )
        else:
            found.append(replace(span, sequence=0))
    return found


def _cancel_what_came_of(submitting: asyncio.Future[Handle]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


_EVERY = 2.0  # seconds between looks


def lives(actor: str) -> bool:
    """Whether an actor of Ray Serve is there. Ray does not notify a generator's process of its reader's end."""
    try:
        ray.get_actor(actor, namespace="serve")
    except ValueError:
        return False
    except ray.exceptions.RayError:  # the cluster's head does not answer: nothing is known
        return True
    return True


class Callers:
    """Cancels the requests of ingresses that have died: nobody reads them. Belongs to one event loop, in which a task
    looks for them while there are any."""

    def __init__(self, alive: Callable[[str], bool] = lives, every: float = _EVERY) -> None:
        self._alive, self._every = alive, every
        self._handles: defaultdict[str, set[Handle]] = defaultdict(set)
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def serving(self, caller: str | None, handle: Handle) -> Iterator[None]:
        """Cancel `handle` if its caller dies meanwhile. Without a caller, nobody looks."""
        if caller is None:
            yield
            return
        self._handles[caller].add(handle)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._handles[caller].discard(handle)
            if not self._handles[caller]:
                del self._handles[caller]

    async def _look(self) -> None:
        while self._handles:
            await asyncio.sleep(self._every)
            for caller in list(self._handles):
                if not await asyncio.to_thread(self._alive, caller):
                    for handle in self._handles.get(caller, ()):
                        handle.cancel()
