"""How much of a draft is verified: as far as the next token is worth its price.

A pass of n rows takes price(n) milliseconds, and a drafted node is a token with the chance that the target reaches it.
The most tokens a second are had where a pass verifies the nodes with the largest (sum of chances) - rate * price, if
`rate` is the tokens a millisecond that rounds then bring (Dinkelbach 1967, fractional programming): from any rate, the
rounds that are best by it bring more, until they bring as much. The rate is measured, the cost of drafts is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from outrider.plans.pass_prices import Price
from outrider.runtime.drafters.calibration import Calibration

_FEWEST = 8  # rounds that a rate stands on
_KEPT = 1 - 1 / 64  # of what earlier rounds have shown, after each round


class PriceCurve:
    """Milliseconds of a pass by its rows: between measured sizes on a line, after the last one as the larger half of
    them continues. A pass of more rows never costs less: where it was measured so, both cost their mean."""

    def __init__(self, prices: Sequence[Price]) -> None:
        """`prices` ascend by rows."""
        rows, ms = [price.rows for price in prices], _ascending([price.ms for price in prices])
        self._most = rows[-1]
        self._table: list[float] = np.interp(range(1 + self._most), rows, ms).tolist()  # by rows
        middle = (len(prices) - 1) // 2
        span = rows[-1] - rows[middle]
        self._slope = float(ms[-1] - ms[middle]) / span if span else 0.0

    def price(self, rows: int) -> float:
        """Milliseconds of a pass of `rows` rows."""
        return self._table[rows] if rows <= self._most else self._table[-1] + self._slope * (rows - self._most)

    def prices_after(self, rows: int, count: int) -> list[float]:
        """Milliseconds of passes of 1, 2, ... `count` rows more than `rows`."""
        if rows + count <= self._most:
            return self._table[rows + 1 : rows + 1 + count]
        return [self.price(rows + more) for more in range(1, 1 + count)]


def worth_verifying(drafts: Sequence[Sequence[float]], rows: int, curve: PriceCurve, rate: float) -> list[list[int]]:
    """Choose the nodes of `drafts` that a pass over `rows` other tokens is to verify too: of each draft, ascending.

    A draft has the chance of each node, which is at most that of its parent, and parents come first: with a node, its
    ancestors are chosen. `rate` is in tokens a millisecond. The likeliest node of all is always chosen: a draft of
    which nothing is verified teaches nothing.
    """
    ranked = sorted((-chance, place, index) for index, draft in enumerate(drafts) for place, chance in enumerate(draft))
    found: list[list[int]] = [[] for _ in drafts]
    for _, place, index in ranked[: _best_count([-chance for chance, _, _ in ranked], rows, curve, rate)]:
        found[index].append(place)
    return [sorted(places) for places in found]


def _best_count(ranked: Sequence[float], rows: int, curve: PriceCurve, rate: float) -> int:
    """How many of the nodes, whose chances are `ranked`, the best first, are worth their price; the most of those
    numbers that are worth the same, and at least one node where there is one."""
    chances, best, found = 0.0, -inf, 0
    for place, price in enumerate(curve.prices_after(rows, len(ranked))):
        chances += ranked[place]
        gain = chances - rate * price
        if gain >= best:
            best, found = gain, place + 1
    return found


class VerifyLength:
    """Chances of one drafter's nodes, and the rate of its rounds, for one way of sampling.

    The rate is in milliseconds of the table: a machine that is slower today, or a longer context, makes every pass as
    much slower, and the rule asks only how passes of different sizes compare. So a round counts as long as the table
    says of its pass, and longer by as much as it was longer than its pass by the clock.
    """

    def __init__(self, curve: PriceCurve) -> None:
        self.curve = curve
        self._calibrations = Calibration(), Calibration()  # of an engine's drafts, and of the host's before it
        self._rounds = 0
        self._tokens = self._priced = self._verifying = self._whole = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens that a millisecond of the table brings; None while too few rounds are known."""
        if self._rounds < _FEWEST:
            return None
        return self._tokens / self._priced * self._verifying / self._whole

    def note_round(self, rows: int, tokens: int, verifying: float, whole: float) -> None:
        """A round has committed `tokens` by a pass of `rows`: of its `whole` seconds, the pass took `verifying`."""
        self._rounds += 1
        self._tokens = _KEPT * self._tokens + tokens
        self._priced = _KEPT * self._priced + self.curve.price(rows)
        self._verifying = _KEPT * self._verifying + verifying
        self._whole = _KEPT * self._whole + whole

    def note_verified(
        self, parent: Sequence[int], scores: Sequence[float], accepted: set[int], *, by_host: bool = False
    ) -> None:
        """Learn which nodes of a draft the target has come to; see `Calibration.note_verified`."""
        self._calibrations[by_host].note_verified(parent, scores, accepted)

    def chances(self, parent: Sequence[int], scores: Sequence[float], *, by_host: bool = False) -> list[float]:
        """Chance of each node of a draft; see `Calibration.chances`."""
        return self._calibrations[by_host].chances(parent, scores)

    def choose(self, parent: Sequence[int], scores: Sequence[float], rows: int, *, by_host: bool = False) -> list[int]:
        """Choose the nodes of one draft that a pass over `rows` other tokens is to verify too, ascending; all of them
        while the rate is not known."""
        rate = self.rate
        if rate is None:
            return list(range(len(parent)))
        chances = self.chances(parent, scores, by_host=by_host)
        ranked = sorted(chances, reverse=True)
        count = _best_count(ranked, rows, self.curve, rate)
        if chances[:count] == ranked[:count]:  # of chains always
            return list(range(count))
        return sorted(sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:count])


def common_rate(lengths: Iterable[VerifyLength]) -> float | None:
    """The rate of a pass that several share: the mean of those that are known, each being of all tokens of a pass."""
    known = [rate for length in lengths if (rate := length.rate) is not None]
    return sum(known) / len(known) if known else None


def _ascending(values: Sequence[float]) -> NDArray[np.float64]:
    """The nearest sequence, by squares, that never falls: neighbours that do are replaced by their mean."""
    pools: list[tuple[float, int]] = []  # mean, and of how many
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, n), (other, m) = pools[-2:]
            pools[-2:] = [((n * one + m * other) / (n + m), n + m)]
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])
