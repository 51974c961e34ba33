"""How long the runs still to come should take, from what those before them took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Step:
    """A generation of `mode` behind `prompt`. `work` is a guess at what it costs, in any unit, beside other steps."""

    mode: str
    prompt: Hashable
    work: float


def guess_work(prompt_tokens: int, new_tokens: int) -> float:
    """Of a generation, in generated tokens: those of a prompt are computed many at once."""
    return new_tokens + prompt_tokens / 10


class TimeLeft:
    """Seconds for the steps that are planned and have not begun: what the same step took before, else by its work.

    `clock` gives seconds.
    """

    def __init__(self, planned: Iterable[Step], clock: Callable[[], float] = perf_counter) -> None:
        self._planned, self._clock = Counter(planned), clock
        self._total, self._done = self._planned.total(), 0
        self._seconds: defaultdict[Step, list[float]] = defaultdict(list)
        self._running: tuple[Step, float] | None = None

    def begin(self, step: Step) -> tuple[int, int, float | None]:
        """A step begins, and so the one before has ended: steps done, of how many, and the seconds left.

        None before a step has ended.
        """
        now = self._clock()
        if self._running is not None:
            before, began = self._running
            self._seconds[before].append(now - began)
            self._planned[before] -= 1
            self._done += 1
        self._running = step, now
        return self._done, self._total, self._left() if self._seconds else None

    def _left(self) -> float:
        spent: defaultdict[str, float] = defaultdict(float)
        work: defaultdict[str, float] = defaultdict(float)
        for step, seconds in self._seconds.items():
            spent[step.mode] += sum(seconds)
            work[step.mode] += step.work * len(seconds)
        overall = sum(spent.values()) / sum(work.values())

        def expected(step: Step) -> float:
            seconds = self._seconds.get(step)
            if seconds:
                return sum(seconds) / len(seconds)
            return step.work * (spent[step.mode] / work[step.mode] if work[step.mode] else overall)

        return sum(runs * expected(step) for step, runs in self._planned.items() if runs > 0)
