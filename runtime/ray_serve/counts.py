"""The counts of all replicas together, those of replicas that are gone included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from runtime.scheduler_stats import SchedulerStats


class Counts:
    """Told now and then what each replica has counted; `total` never falls, but for the requests that are there now."""

    def __init__(self) -> None:
        self._gone = SchedulerStats()
        self._present: dict[str, SchedulerStats] = {}
        self.total = SchedulerStats()

    def tell(self, found: Mapping[str, SchedulerStats]) -> None:
        """Take in what the replicas of now have counted. A replica that is not there is gone, with what it had."""
        left = [replace(stats, waiting=0, running=0) for name, stats in self._present.items() if name not in found]
        self._gone = _together([self._gone, *left])
        self._present = dict(found)
        self.total = _together([self._gone, *self._present.values()])


def _together(several: Iterable[SchedulerStats]) -> SchedulerStats:
    total = SchedulerStats()
    for each in several:
        for name in (field.name for field in fields(each)):
            mine, other = getattr(total, name), getattr(each, name)
            setattr(total, name, max(mine, other) if name == "longest_round_ms" else mine + other)
    return total
