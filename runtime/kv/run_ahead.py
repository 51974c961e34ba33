"""Lossless partial KV: passes over the partial cache run ahead, and one over the full cache confirms.

Passes over the partial cache, with the sequence's drafter, make *tentative* tokens. One pass over the full cache takes
all of them as a chain after the tip and accepts by the rule of all drafts: what leaves the runtime is the target's.
This is the policy of one generation: how many tentative tokens there may be before a pass confirms them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from outrider.runtime.kv.partial_policy import Budget, Interval
from outrider.runtime.options.request import Request
from outrider.runtime.sampling import SamplingParams
from outrider.runtime.stats import Stats

_ALIKE = 1.5  # contexts whose lengths have no larger quotient cost about the same


class RunAhead:
    """How far a generation runs ahead over the partial cache, by what was measured."""

    def __init__(
        self, interval: Interval, budget: Budget, stats: Stats, ends: Collection[int], *, always: bool
    ) -> None:
        """`ends` are tokens after which nothing follows. `always`: whether running ahead pays or not."""
        self.interval, self.budget, self._stats, self._ends, self._always = interval, budget, stats, ends, always
        self.over = False  # a tentative token ends the sequence
        self.steady = True  # the round before this one read the full cache too, and confirmed nothing
        self._fill_ms = 0.0
        self._begun = False  # a pass has caught up with what the drafter lacked

    def room(self, tokens: int, waiting: int, end: int, most: int) -> int:
        """Most tokens that a pass over the partial cache may add to a sequence of `tokens`, of which some wait to be
        confirmed; 0 where it is time to confirm, or running ahead does not pay.

        A pass over the full cache confirms at most `most` of them.
        """
        room = min(end - 1 - tokens, most - waiting)
        if self.over or room < 1 or waiting >= self.interval.length:
            return 0
        return room if waiting or self._always or self.interval.ahead else 0

    def note_fill(self, ms: float) -> None:
        """Record the time of filling the partial cache."""
        self._fill_ms = ms

    def cut(self, chosen: list[int]) -> list[int]:
        """Return the tokens that a pass over the partial cache chose, up to one that ends the sequence."""
        stop = next((i + 1 for i, token in enumerate(chosen) if token in self._ends), None)
        self.over = stop is not None
        return chosen[:stop]

    def note_pass(self, ms: float, tokens: int, drafted: int) -> bool:
        """A pass over the partial cache added `tokens`; whether its time says something."""
        stats, says = self._stats, self._begun
        if says:
            self.interval.note_pass(ms, tokens, drafted)
        self._begun, self.steady = True, False
        stats.partial_rounds += 1
        stats.partial_ms += ms
        stats.tentative += tokens
        return says

    def note_plain(self, ms: float, tokens: int, *, settled: bool) -> None:
        """A round over the full cache that confirmed nothing took so long; a `settled` one, which the first is not,
        shows what they cost."""
        self.steady = True
        if settled:
            self.interval.note_plain(ms, tokens)

    def note_confirmed(self, ms: float, checked: int, agreed: int) -> None:
        """Record a round over the full cache that confirmed `agreed` of `checked` tokens."""
        self.interval.note_confirmed(ms, checked, agreed, self._fill_ms)
        self.budget.note_confirmed(checked, agreed)
        stats = self._stats
        stats.agreed += agreed
        stats.retracted += checked - agreed
        stats.parted += agreed < checked


@dataclass(frozen=True)
class _Measured:
    """Cost and tokens of running ahead, with one sampling, after a context of some length."""

    interval: Interval
    sampling: SamplingParams
    tokens: int


class Intervals:
    """Measurements by drafter and requested budget."""

    def __init__(self, most: int) -> None:
        """`most` tokens may wait to be confirmed."""
        self._most = most
        self._measured: dict[tuple[object, object], _Measured] = {}

    def interval_for(self, request: Request, tokens: int) -> Interval:
        """The interval measured for the same sampling after a similar context; else a new one."""
        key, unseeded = (request.drafter, request.partial_budget), replace(request.sampling, seed=0, stream_id=0)
        known = self._measured.get(key)
        if known is None or known.sampling != unseeded or not known.tokens / _ALIKE <= tokens <= known.tokens * _ALIKE:
            known = self._measured[key] = _Measured(Interval(self._most), unseeded, tokens)
        return known.interval
