"""A session and the prefix cache: what is known of its sequence is copied in, what it has computed is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans import names
from plans.errors import RequestError
from runtime.drafters.graph import EngineDrafter
from runtime.execution.buffers import Buffers
from runtime.kv.arena_rows import ArenaRows
from runtime.kv.slots import BRANCH, SlotTable
from runtime.prefix_cache.cache import PrefixCache


class SessionMemory:
    """Rows of a session's target and of its drafters with an arena, whoever of these was asked."""

    def __init__(
        self, cache: PrefixCache, buffers: Buffers, slots: SlotTable, drafters: Mapping[str, EngineDrafter]
    ) -> None:
        """Raises RequestError where rows lie on a device."""
        if buffers.exchange is not None:
            raise RequestError(
                "A prefix cache keeps rows in the host's memory, and this backend has them on a device; load "
                "the plan without prefix_cache (a server: with --no-prefix-cache)."
            )
        self._cache, self._slots, self._drafters = cache, slots, drafters
        self._rows = ArenaRows(buffers.of(names.TARGET, names.KV)[:, 0])

    def recall(self, tokens: Sequence[int]) -> int:
        """Copy in the rows that the sequence `tokens` lacks, but for its tip's; how many there were of the target.

        What is in the arena already stays where it is.
        """
        match = self._cache.match(tokens)
        try:
            had, rows = self._slots.length, min(match.rows.get(names.TARGET, 0), len(tokens) - 1)
            if rows > had:
                self._cache.read(match, names.TARGET, had, rows, self._rows)
                self._slots.restore(rows - had, BRANCH, had)
            for name, drafter in self._drafters.items():
                known = min(match.rows.get(name, 0), len(tokens) - 1)
                if known > drafter.kept.reach:
                    for first, last, place in drafter.kept.missing(known):
                        self._cache.read(match, name, first, last, place)
                    drafter.kept.restore(known)
        finally:
            self._cache.release(match)
        return max(0, rows - had)

    def note_reused(self, tokens: int) -> None:
        """So many tokens of the sequence that was recalled are not computed again."""
        self._cache.note_reused(tokens)

    def keep(self, tokens: Sequence[int], *, wait: bool) -> None:
        """Insert what the sequence has rows of; without `wait`, only where nobody else is at the cache."""
        rows = {name: (drafter.kept.known, drafter.kept.leading) for name, drafter in self._drafters.items()}
        length = self._slots.length
        self._cache.insert(tokens[:length], {names.TARGET: (length, self._rows), **rows}, wait=wait)
