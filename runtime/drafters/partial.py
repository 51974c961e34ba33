"""A drafter that runs ahead over the partial arena: what it commits there is a draft for the full one (DESIGN 8).

Passes over the partial arena, with another drafter inside, make *tentative* tokens. One pass over the full arena takes
all of them as a chain behind the tip and accepts by the rule of all drafts: what leaves the runtime is the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.errors import PlanError
from runtime.drafters.adaptive import AdaptiveSpeculation
from runtime.drafters.base import Drafter
from runtime.execution.step import TargetStep
from runtime.execution.target_pass import TargetPasses
from runtime.kv.partial import PartialArena
from runtime.kv.partial_policy import Budget, Interval
from runtime.stats import Stats


class PartialDrafter:
    """One generation's. `inner` drafts for passes over the partial arena; None: they are of one token.

    A drafter for rounds that confirm; where nothing waits, rounds have the inner one.
    """

    filler_top_k = 0
    entropy = None
    trials = None
    scores = None

    def __init__(
        self,
        inner: Drafter | None,
        arena: PartialArena,
        passes: TargetPasses,
        interval: Interval,
        budget: Budget,
        stats: Stats,
        ends: Collection[int],
        fill: Callable[[], None],
        *,
        always: bool,
    ) -> None:
        """`fill` has the partial arena take over what the full one holds. `always`: whether it pays or not."""
        self._inner, self._arena, self._passes = inner, arena, passes
        self._interval, self._budget, self._stats, self._ends, self._fill = interval, budget, stats, ends, fill
        self._always, self._fill_ms = always, 0.0
        self._enabled: Drafter | None = inner  # the inner one, where it follows what happens
        self._ahead: list[int] = []  # the sequence with tentative tokens behind it
        self._confirmed = 0  # tokens of it that are not
        self._over = False  # a tentative token ends the sequence
        self._begun = False  # a pass has caught up with what the inner drafter lacked
        self._checking = 0  # tentative tokens that the running round confirms
        self._missed = False  # the inner drafter has: its pass came to nothing
        self.steady = True  # the round before this one ran over the full arena too, and confirmed nothing

    @property
    def tentative(self) -> list[int]:
        """Tokens that wait to be confirmed."""
        return self._ahead[self._confirmed :]

    def advance(
        self, tokens: list[int], end: int, adaptive: AdaptiveSpeculation | None, *, disabled: bool
    ) -> list[int]:
        """One pass over the partial arena behind `tokens`, which are confirmed; the tentative tokens that it adds.

        The inner drafter drafts where `adaptive` speculation lets it; a `disabled` one does not follow either. Empty
        where it is time to confirm: as many wait as pay, the arena is full, one ends the sequence, or it comes to `end`
        tokens.
        """
        self._follow_confirmed(tokens)
        arena, ahead = self._arena, self._ahead
        waits = len(ahead) - self._confirmed
        room = min(end - 1 - len(ahead), self._passes.step.max_nodes - waits)
        if (
            self._over
            or room < 1
            or waits >= self._interval.length
            or not (waits or self._always or self._interval.ahead)
        ):
            return []
        if not waits:
            began = perf_counter()
            self._fill()
            self._fill_ms = 1000 * (perf_counter() - began)
        if not arena.ready(len(ahead)):
            return []
        inner = self._enabled = None if disabled else self._inner
        drafting = adaptive is None or adaptive.drafting
        if inner is not None:
            inner.suppose(self._confirmed)
            if not drafting:
                inner.absorb(ahead)
        try:
            passed = self._passes.decode(arena, ahead, inner if drafting else None, room)
        except PlanError as error:
            self._arena.give_up(str(error))
            self.take_back()
            self._missed = inner is not None
            return []
        stop = next((i + 1 for i, token in enumerate(passed.chosen) if token in self._ends), None)
        self._over = stop is not None
        chosen = passed.chosen[:stop]
        self.steady = False
        ahead += chosen
        rows = passed.rows(len(chosen))
        arena.slots.commit(rows, passed.program.kept)
        arena.note_step()
        if inner is not None:
            inner.follow(passed.start, rows, passed.program.kept, self._passes.count)
        if self._begun:
            self._interval.note_pass(passed.ms, len(chosen), self._passes.step.drafted)
            if adaptive is not None and disabled == adaptive.disabled:
                adaptive.note(passed.ms / 1000, len(chosen), partial=True)
        self._begun = True
        stats = self._stats
        stats.partial_rounds += 1
        stats.partial_ms += passed.ms
        stats.tentative += len(chosen)
        return chosen

    def has_missed(self) -> bool:
        """Whether the inner drafter has to be woken, as its last pass came to nothing; said once."""
        missed, self._missed = self._missed, False
        return missed

    def _follow_confirmed(self, tokens: list[int]) -> None:
        """The sequence without tentative tokens may have grown since."""
        if len(self._ahead) == self._confirmed and self._confirmed != len(tokens):
            self._ahead += tokens[self._confirmed :]
            self._confirmed = len(tokens)

    def take_back(self) -> None:
        """Forget what is tentative, and all that came of it."""
        if len(self._ahead) > self._confirmed:
            self._arena.truncate(self._confirmed)
            if self._enabled is not None:
                self._enabled.truncate(self._confirmed)
        if self._inner is not None:
            self._inner.suppose(None)
        del self._ahead[self._confirmed :]
        self._over = False

    # A drafter for rounds over the full arena.

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        return iter(())

    def suppose(self, length: int | None) -> None:
        """Nothing asks it."""

    def truncate(self, length: int) -> None:
        """It lives as long as a generation, which is never cut."""

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        return rows

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        """The tentative tokens as a chain behind the tip; they are a draft now, and nothing else any more."""
        waiting = self.tentative[:limit]
        self.take_back()
        root, count = step.new_tokens - 1, len(waiting)
        self._checking = count
        step.token_ids[root + 1 : root + 1 + count] = waiting
        step.parent[root + 1 : root + 1 + count] = np.arange(root, root + count)
        step.append_nodes(count)
        return names.VERIFY

    def absorb(self, tokens: Sequence[int]) -> None:
        """There is no room for a draft, and so for no token but the next: nothing waits."""
        self.take_back()

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """What was likely is not learned from here."""

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        """Tokens are confirmed: features are true ones now."""
        if self._enabled is not None:
            self._enabled.follow(start, rows, kept, passes)

    def note_plain(self, ms: float, tokens: int, *, settled: bool) -> None:
        """A round over the full arena that confirmed nothing took so long; a `settled` one, which the first is
        not, tells what they cost."""
        self.steady = True
        if settled:
            self._interval.note_plain(ms, tokens)

    def note_confirmed(self, ms: float) -> None:
        """A round over the full arena that confirms tokens took so long."""
        checked, agreed = self._checking, min(self._passes.committed - 1, self._checking)
        if not checked:
            return
        self._interval.note_confirmed(ms, checked, agreed, self._fill_ms)
        self._budget.note_confirmed(checked, agreed)
        stats = self._stats
        stats.agreed += agreed
        stats.retracted += checked - agreed
        stats.parted += agreed < checked
        self._checking = 0


def waiting(ahead: PartialDrafter | None) -> bool:
    """Whether tokens wait to be confirmed."""
    return ahead is not None and bool(ahead.tentative)
