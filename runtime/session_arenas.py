"""Which arena a session's rounds run over: the full one, or, behind a long context, the partial one as well."""

from __future__ import annotations

from functools import partial as partial_of

from plans import names
from plans.errors import PlanError, RequestError
from plans.manifest import Manifest, longest_draft
from plans.partial_kv import PartialMode
from runtime.arena import SlotMap
from runtime.assembly import Assembly
from runtime.drafters import Drafter
from runtime.drafters.partial import PartialDrafter
from runtime.partial_kv import PartialArena
from runtime.partial_policy import Budget, Interval
from runtime.request import Request
from runtime.stats import Stats
from runtime.target_pass import Passed, TargetArena, TargetPasses

_ALIKE = 1.5  # contexts whose lengths have no larger quotient cost about the same


class SessionArenas:
    """The arenas of a session's target. Without a partial one in the plan, all rounds run over the full one.

    `lossy`: rounds over the partial arena commit tokens; now and then one over the full arena gives rows to all of
    them, and fills it anew. `lossless`: rounds run over the full arena; passes over the partial one draft for them.
    """

    def __init__(self, manifest: Manifest, parts: Assembly, slots: SlotMap, passes: TargetPasses) -> None:
        self._full, self._passes = TargetArena(slots, parts.step.largest_view), passes
        self._partial: PartialArena | None = None
        if manifest.partial_kv is not None:
            refresh, longest = parts.programs[names.REFRESH], longest_draft(manifest.drafters)
            self._partial = PartialArena(manifest.partial_kv, parts.buffers, parts.step, refresh, longest)
        self._interval, self._measured_at = Interval(parts.step.max_nodes), 0  # tokens of context
        self._budget = Budget(1, 1, 0, 0)  # of the generation
        self._last: Passed | None = None  # over the full arena, whose queries are there still

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
        self._last = passed
        if mode == "lossy":
            self._fill(stats)

    def _fill(self, stats: Stats) -> None:
        """Fill the partial arena, unless it stands for the same: the last pass was one over the full arena."""
        partial, rows = self._partial, self._full.known
        if partial is None or self._last is None or partial.known == rows:
            return
        partial.budget = self._budget.blocks
        if partial.wanted(rows) and partial.fill(rows, self._last):
            stats.refreshes += 1
            stats.retrieved = partial.budget
        self._last = None

    def begin(
        self, request: Request, drafter: Drafter | None, stats: Stats, tokens: int, room: int
    ) -> PartialDrafter | None:
        """A generation behind so many tokens, with room for as many more, begins.

        Returns what runs ahead of the full arena in it, where that is asked for.
        """
        partial, asked = self._partial, request.partial_budget
        if partial is None:
            return None
        settings = partial.settings
        most = settings.n_retrieval_blocks
        fixed = None if asked == "auto" else most if asked is None else asked
        self._budget = Budget(most, fixed, tokens // settings.block_size, room)
        if request.partial_kv != "lossless":
            return None
        self._last = None
        if not self._measured_at / _ALIKE <= tokens <= self._measured_at * _ALIKE:
            self._interval, self._measured_at = Interval(self._passes.step.max_nodes), tokens
        ends, fill, always = request.eos_token_ids, partial_of(self._fill, stats), not request.auto_disable
        return PartialDrafter(
            drafter, partial, self._passes, self._interval, self._budget, stats, ends, fill, always=always
        )

    def truncate(self, length: int) -> None:
        """The sequence now has `length` tokens, those before them unchanged."""
        if self._partial is not None:
            self._partial.truncate(length)
