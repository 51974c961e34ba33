"""Which arena a session's rounds run over: the full one, or, behind a long context, the partial one as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial as partial_of

from plans import names
from plans.errors import PlanError, RequestError
from plans.manifest import Manifest, longest_draft
from plans.partial_kv import PartialMode
from runtime.drafters import Drafter
from runtime.drafters.partial import PartialDrafter
from runtime.execution.assembly import Assembly
from runtime.execution.target_pass import Passed, TargetArena, TargetPasses
from runtime.kv.partial import PartialArena
from runtime.kv.partial_policy import Budget, Interval
from runtime.kv.slots import SlotTable
from runtime.request import Request
from runtime.sampling import SamplingParams
from runtime.stats import Stats

_ALIKE = 1.5  # contexts whose lengths have no larger quotient cost about the same


@dataclass(frozen=True)
class _Measured:
    """What runs ahead has cost and brought, sampling so, behind so many tokens."""

    interval: Interval
    sampling: SamplingParams
    tokens: int


class SessionArenas:
    """The arenas of a session's target. Without a partial one in the plan, all rounds run over the full one.

    `lossy`: rounds over the partial arena commit tokens; now and then one over the full arena gives rows to all of
    them, and fills it anew. `lossless`: rounds run over the full arena; passes over the partial one draft for them.
    """

    def __init__(self, manifest: Manifest, parts: Assembly, slots: SlotTable, passes: TargetPasses) -> None:
        self._full, self._passes = TargetArena(slots, parts.step.largest_view), passes
        self._partial: PartialArena | None = None
        if manifest.partial_kv is not None:
            refresh, longest = parts.programs[names.REFRESH], longest_draft(manifest.drafters)
            self._partial = PartialArena(manifest.partial_kv, parts.buffers, parts.step, refresh, longest)
        self._measured: dict[tuple[object, object], _Measured] = {}  # by drafter, and the budget that was asked for
        self._budget = Budget(1, 1, 0, 0)  # of the generation
        self._last: tuple[Passed, int] | None = None  # over the full arena, the `count`-th

    def either(self, *, partial: bool) -> TargetArena:
        """One of the two. Raises `RequestError` for a partial arena where the plan has none."""
        if not partial:
            return self._full
        if self._partial is None:
            raise RequestError("The plan has no partial arena; build it with partial_kv.enabled.")
        return self._partial

    def decode(
        self, mode: PartialMode, tokens: list[int], drafter: Drafter | None, room: int
    ) -> tuple[TargetArena, Passed]:
        """The pass of a round, as `TargetPasses.decode`, and where it ran: what fails over the partial arena does so
        once, and runs over the full one."""
        partial = self._partial
        if partial is not None and mode == "lossy" and partial.ready(len(tokens)):
            try:
                return partial, self._passes.decode(partial, tokens, drafter, room)
            except PlanError as error:
                partial.give_up(str(error))
        return self._full, self._passes.decode(self._full, tokens, drafter, room)

    def ran(self, arena: TargetArena, passed: Passed, mode: PartialMode, stats: Stats) -> None:
        """A round has run over `arena`, and its rows were committed: a full one says what the partial arena holds."""
        partial = self._partial
        if partial is None or mode == "off":
            return
        if arena is partial:
            partial.note_step()
            stats.partial_rounds += 1
            stats.partial_ms += passed.ms
            return
        self._last = passed, self._passes.count
        if mode == "lossy":
            self._fill(stats)

    def _fill(self, stats: Stats) -> None:
        """Fill the partial arena, unless it stands for the same, by the queries of a round over the full one: where
        that was the last pass, they are there still."""
        partial, rows, last = self._partial, self._full.known, self._last
        if partial is None or last is None or (partial.known == rows and partial.budget == self._budget.blocks):
            return
        self._last = None
        partial.budget = self._budget.blocks
        if last[1] == self._passes.count and partial.wanted(rows) and partial.fill(rows, last[0]):
            stats.refreshes += 1
            stats.retrieved = partial.budget

    def begin(
        self, request: Request, drafter: Drafter | None, stats: Stats, tokens: int, room: int
    ) -> PartialDrafter | None:
        """A generation behind so many tokens, with room for as many more, begins.

        Returns what runs ahead of the full arena in it, where that is asked for.
        """
        partial = self._partial
        if partial is None:
            return None
        settings, asked = partial.settings, request.partial_budget
        most = settings.n_retrieval_blocks
        fixed = None if asked == "auto" else most if asked is None else asked
        self._budget = Budget(most, fixed, tokens // settings.block_size, room)
        if request.partial_kv != "lossless":
            return None
        self._last = None
        interval, ends, fill = self._interval(request, tokens), request.eos_token_ids, partial_of(self._fill, stats)
        return PartialDrafter(
            drafter,
            partial,
            self._passes,
            interval,
            self._budget,
            stats,
            ends,
            fill,
            always=not request.auto_disable,
        )

    def _interval(self, request: Request, tokens: int) -> Interval:
        """What was measured with the drafter and budget, if that was for the same sampling behind a context alike."""
        key, unseeded = (request.drafter, request.partial_budget), replace(request.sampling, seed=0, stream=0)
        known = self._measured.get(key)
        if known is None or known.sampling != unseeded or not known.tokens / _ALIKE <= tokens <= known.tokens * _ALIKE:
            known = self._measured[key] = _Measured(Interval(self._passes.step.max_nodes), unseeded, tokens)
        return known.interval

    def truncate(self, length: int) -> None:
        """The sequence now has `length` tokens, those before them unchanged."""
        if self._partial is not None:
            self._partial.truncate(length)
