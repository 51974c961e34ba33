"""The step loops of one runtime, lent to sessions, one-off generations, branches and the scheduler."""

from __future__ import annotations

import threading
import weakref
from collections import abc, deque

from outrider.runtime.execution.assembly import LoadedPlan
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.text.common_length import common_length

MAX_IDLE = 1  # idle loops that are kept; each holds its buffers
# Where rounds are recorded, all are: a recording takes seconds, and not every library gives its memory back.


class StepLoopPool:
    """Lends step loops. Safe to use from several threads, and in finalisers: no lock is waited for."""

    def __init__(self, loaded: LoadedPlan, cache: PrefixCache | None = None) -> None:
        """Make the first loop, which resolves every program: a wrong plan is found here, before any prompt."""
        self.loaded, self.cache = loaded, cache
        self._all: weakref.WeakSet[StepLoop] = weakref.WeakSet()
        self._counting = threading.Lock()
        first = self._make()
        self.idle = deque([first], maxlen=None if first.records else MAX_IDLE)

    def _make(self) -> StepLoop:
        loop = StepLoop(self.loaded, self.cache)
        with self._counting:
            self._all.add(loop)
        return loop

    def borrow(self, tokens: abc.Sequence[int] = ()) -> StepLoop:
        """Return an idle loop, or a new one.

        With a prefix cache a step loop may still have a sequence; the idle loop whose sequence shares most with
        `tokens` is preferred. Raises PlanError where the plan was written over.
        """
        self.loaded.files.check()
        idle = list(self.idle)
        if tokens and self.cache is not None:
            idle.sort(key=lambda loop: max((common_length(s.tokens, tokens) for s in loop.sequences), default=0))
        for loop in reversed(idle):
            try:
                self.idle.remove(loop)
            except ValueError:  # another thread has taken it meanwhile
                continue
            return loop
        return self._make()

    def give_back(self, loop: StepLoop) -> None:
        """Make the loop idle; where too many are, the oldest is dropped, unless it has recorded rounds."""
        self.idle.append(loop)

    @property
    def loops(self) -> abc.Sequence[StepLoop]:
        """All step loops, lent or idle."""
        with self._counting:
            return list(self._all)
