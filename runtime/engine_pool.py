"""Engines of one runtime, lent to whoever generates: sessions, one-off generations, branches, the scheduler."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence as List

from runtime.engine import Engine
from runtime.execution.assembly import Loaded
from runtime.prefix_cache.cache import PrefixCache
from runtime.prefix_cache.radix_tree import common_length

MAX_IDLE = 1  # engines that are kept for the next to come; each holds its buffers


class EnginePool:
    """Lends an engine at a time to each. Safe to use from several threads, and in finalisers: no lock is waited for."""

    def __init__(self, loaded: Loaded, cache: PrefixCache | None = None) -> None:
        """Makes the first engine, which resolves every program: a wrong plan is found here, before any prompt."""
        self.loaded, self.cache = loaded, cache
        self._all: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._counting = threading.Lock()
        self.idle = deque([self._make()], maxlen=MAX_IDLE)

    def _make(self) -> Engine:
        engine = Engine(self.loaded, self.cache)
        with self._counting:
            self._all.add(engine)
        return engine

    def borrow(self, tokens: List[int] = ()) -> Engine:
        """An engine that was used before, or a new one.

        With a prefix cache it may still have a sequence: of the engines that are idle, the one most like `tokens`.
        """
        idle = list(self.idle)
        if tokens and self.cache is not None:
            idle.sort(key=lambda engine: max((common_length(s.tokens, tokens) for s in engine.sequences), default=0))
        for engine in reversed(idle):
            try:
                self.idle.remove(engine)
            except ValueError:  # another thread has taken it meanwhile
                continue
            return engine
        return self._make()

    def give_back(self, engine: Engine) -> None:
        """The engine is free; where too many are, the oldest goes."""
        self.idle.append(engine)

    @property
    def engines(self) -> List[Engine]:
        """All that there are, lent or idle."""
        with self._counting:
            return list(self._all)
