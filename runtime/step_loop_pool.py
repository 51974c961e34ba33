"""The engines of one runtime, lent to sessions, one-off generations, branches and the scheduler."""

from __future__ import annotations

import threading
import weakref
from collections import abc, deque

from outrider.runtime.execution.assembly import LoadedPlan
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.text.common_length import common_length

MAX_IDLE = 1  # idle engines that are kept; each holds its buffers
# Where rounds are recorded, all are: a recording takes seconds, and not every library gives its memory back.


class StepLoopPool:
    """Lends engines. Safe to use from several threads, and in finalisers: no lock is waited for."""

    def __init__(self, loaded: LoadedPlan, cache: PrefixCache | None = None) -> None:
        """Make the first engine, which resolves every program: a wrong plan is found here, before any prompt."""
        self.loaded, self.cache = loaded, cache
        self._all: weakref.WeakSet[StepLoop] = weakref.WeakSet()
        self._counting = threading.Lock()
        first = self._make()
        self.idle = deque([first], maxlen=None if first.records else MAX_IDLE)

    def _make(self) -> StepLoop:
        engine = StepLoop(self.loaded, self.cache)
        with self._counting:
            self._all.add(engine)
        return engine

    def borrow(self, tokens: abc.Sequence[int] = ()) -> StepLoop:
        """Return an idle engine, or a new one.

        With a prefix cache an engine may still have a sequence; the idle engine whose sequence shares most with
        `tokens` is preferred. Raises PlanError where the plan was written over.
        """
        self.loaded.files.check()
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

    def give_back(self, engine: StepLoop) -> None:
        """Make the engine idle; where too many are, the oldest is dropped, unless it has recorded rounds."""
        self.idle.append(engine)

    @property
    def engines(self) -> abc.Sequence[StepLoop]:
        """All engines, lent or idle."""
        with self._counting:
            return list(self._all)
