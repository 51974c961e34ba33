"""Sessions for one-off generations, kept so that these do not allocate an arena each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.execution.assembly import Loaded
from runtime.generation import Run
from runtime.prefix_cache.cache import PrefixCache
from runtime.prefix_cache.radix_tree import common_length
from runtime.request import Request
from runtime.session import Session

MAX_IDLE = 4  # sessions that are kept; each holds its buffers


class SessionPool:
    """Lends a session to each generation. Safe to use from several threads."""

    def __init__(self, loaded: Loaded, cache: PrefixCache | None = None) -> None:
        """Makes the first session, which resolves every program: a wrong plan is found here, before any prompt."""
        self._loaded, self._cache = loaded, cache
        self.idle = deque([Session(loaded, cache)], maxlen=MAX_IDLE)  # needs no lock, not even in a finaliser

    def run(self, ids: Sequence[int], request: Request) -> Run:
        """Generate behind `ids`, a sequence of its own; nothing is held until the first pass is asked for."""
        with self.borrow(ids) as session:
            return (yield from session.run(ids, request, whole=True))

    @contextmanager
    def borrow(self, ids: Sequence[int] = ()) -> Iterator[Session]:
        """A session that was used before, or a new one.

        It is empty; with a prefix cache it may have a sequence, of those that are idle the one most like `ids`.
        """
        session = self._most_alike(ids)
        try:
            yield session
        finally:
            if self._cache is None or not ids:
                session.reset()
            self.idle.append(session)  # the oldest idle one goes where there are too many

    def _most_alike(self, ids: Sequence[int]) -> Session:
        idle = list(self.idle)
        if self._cache is not None:
            idle.sort(key=lambda session: common_length(session.token_ids, ids))
        for session in reversed(idle):
            try:
                self.idle.remove(session)
            except ValueError:  # another thread has taken it meanwhile
                continue
            if not ids:
                session.reset()
            return session
        return Session(self._loaded, self._cache)
