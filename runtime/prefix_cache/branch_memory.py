"""Branches and the prefix cache: what is known is copied in, what was computed is kept.

That is the prefix that branches share, or, where there is none, all that each of them says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans import names
from runtime.drafters.branch_drafting import Asking
from runtime.drafters.branches import EngineBranches
from runtime.kv.branch_arena import BranchArena
from runtime.prefix_cache.cache import PrefixCache
from runtime.prefix_cache.radix_tree import common_length


class BranchMemory:
    """Rows of the target and of the engine that a branch asks."""

    def __init__(self, cache: PrefixCache, arena: BranchArena, engines: Mapping[str, EngineBranches]) -> None:
        self._cache, self._arena, self._engines = cache, arena, engines
        # By number, the tokens whose rows of the target the row of a branch that is over still holds. A drafter's are
        # gone: trees grow in all rows up to the last that is asked for, read or not.
        self._left: dict[int, list[int]] = {}

    def recall_prefix(self, prefix: Sequence[int], engines: Sequence[EngineBranches]) -> int:
        """Give a prefix that has just begun the rows that are known, of the target and of all these engines; how many.

        A head goes on with the feature of a token that is computed: there, one is.
        """
        if not prefix:
            return 0
        match = self._cache.match(prefix)
        try:
            rows = match.rows.get(names.TARGET, 0)
            for engine in engines:
                rows = min(rows, max(0, match.rows.get(engine.name, 0) - engine.paired))
            if rows:
                self._cache.read(match, names.TARGET, 0, rows, self._arena.restore_prefix(rows))
                for engine in engines:
                    self._cache.read(match, engine.name, 0, rows + engine.paired, engine.restore_prefix(rows))
        finally:
            self._cache.release(match)
        self._cache.note_reused(rows)
        return rows

    def keep_prefix(self, prefix: Sequence[int], engines: Sequence[EngineBranches]) -> None:
        """Insert a prefix, all of whose rows are there."""
        kept = {names.TARGET: (len(prefix), self._arena.prefix_rows())}
        for engine in engines:
            kept[engine.name] = len(prefix), engine.prefix_rows()
        self._cache.insert(prefix, kept)

    def number_for(self, tokens: Sequence[int], free: Sequence[int]) -> int:
        """Of the free numbers, the one whose row holds the most of `tokens`."""
        tokens = list(tokens)
        return max(free, key=lambda number: (self._shared(number, tokens), -number))

    def _shared(self, number: int, tokens: list[int]) -> int:
        return common_length(self._left.get(number, []), tokens)

    def recall(self, asking: Asking) -> tuple[int, int]:
        """Give a branch that has just been added the rows that are known, but for its tip's.

        Returns how many tokens are not computed again, and how many of these were copied in.
        """
        branch = asking.branch
        tokens, number = branch.tokens, branch.number
        match = self._cache.match(tokens)
        try:
            here = self._shared(number, tokens)
            self._left.pop(number, None)
            rows = min(max(match.rows.get(names.TARGET, 0), here), len(tokens) - 1)
            engine = self._engines[asking.engine] if asking.engine is not None else None
            known = 0
            if engine is not None:
                known = min(match.rows.get(engine.name, 0), len(tokens) - 1)
                if engine.paired:  # the next pair takes the feature of a token that is computed again
                    rows = min(rows, max(0, known - 1))
                    known = min(known, rows + 1)
            self._arena.restore(number, rows)
            self._cache.read(match, names.TARGET, here, rows, self._arena.rows_of(number))
            branch.rows = rows
            if engine is not None:
                engine.restore(branch, known)
                self._cache.read(match, engine.name, 0, known, engine.rows_of(branch))
        finally:
            self._cache.release(match)
        self._cache.note_reused(rows)
        return rows, max(0, rows - here)

    def keep(self, asking: Asking) -> None:
        """Insert what a branch has rows of."""
        branch = asking.branch
        kept = {names.TARGET: (branch.rows, self._arena.rows_of(branch.number))}
        if asking.engine is not None:
            engine = self._engines[asking.engine]
            kept[engine.name] = engine.known(branch), engine.rows_of(branch)
        self._cache.insert(branch.tokens[: branch.rows], kept)

    def leave(self, asking: Asking) -> None:
        """The branch is about to be over."""
        branch = asking.branch
        if self._arena.stays:
            self._left[branch.number] = branch.tokens[: branch.rows]

    def forget(self) -> None:
        """Rows in place are worth nothing any more."""
        self._left.clear()
