"""The counts of all replicas together, those of replicas that are gone included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from operator import add
from typing import Any

from outrider.runtime.scheduler_stats import SchedulerStats

_FORGOTTEN = 300  # answers of others that a replica misses until it is taken for gone: ten minutes, as ingresses ask


class Counts:
    """Told now and then what each replica has counted; `total` never falls, but for the requests that are there now."""

    def __init__(self) -> None:
        self._last: dict[str, SchedulerStats] = {}  # by replica
        self._missed: dict[str, int] = {}  # how often each has not answered, one time after another
        self._gone = SchedulerStats()  # of those that are gone: names are never used again
        self.total = SchedulerStats()

    def tell(self, found: Mapping[str, SchedulerStats]) -> None:
        """Take in what the replicas that answer have counted. Of others, what they told last stays, whatever it is that
        keeps them from answering; but nothing is taken to run there.
        """
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
