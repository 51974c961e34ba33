"""Requests by who sent them: those of an ingress that has died are ended, as nobody reads them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from outrider.runtime.handle import Handle

_EVERY = 2.0  # seconds between looks


def lives(actor: str) -> bool:
    """Whether an actor of Ray Serve is there. Ray tells a generator's own process nothing of its reader's end."""
    try:
        ray.get_actor(actor, namespace="serve")
    except ValueError:
        return False
    except ray.exceptions.RayError:  # the cluster's head does not answer: nothing is known
        return True
    return True


class Callers:
    """Belongs to one event loop, in which a task looks after callers while there are any."""

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
