"""Which KV cache a pass reads, the full one or the partial one, and what that changes of a round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from outrider.plans import names
from outrider.runtime.drafters.base import Draft
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.kv.run_ahead import RunAhead
from outrider.runtime.partial_passes import PartialPasses
from outrider.runtime.sequence import Sequence


class KvView(Protocol):
    """What a round asks of the cache that its pass reads."""

    @property
    def cache(self) -> KvCache:
        """The cache that the pass reads and writes."""

    @property
    def partial(self) -> bool:
        """Whether it is the partial one."""

    def begin(self, sequence: Sequence) -> tuple[int, Draft | None]:
        """Prepare the pass; return the first token to feed, and tentative tokens that the pass is to confirm."""

    def room(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence may get."""

    def feeds(self, chunk: int) -> int:
        """Return how many tokens without KV the pass feeds at most, where the sequence drafts."""

    def program(self, name: str) -> str:
        """Return the name of the program that reads this cache as `name` reads the full one."""

    def run_ahead(self, sequence: Sequence) -> RunAhead | None:
        """Return what decides over the tokens of the pass, which wait to be confirmed; None where they count."""

    def commit(self, sequence: Sequence, computed: int) -> None:
        """The pass gave KV to the sequence's first `computed` tokens."""


class FullKv:
    """The full cache: a pass over it also confirms tokens that passes over the partial one chose."""

    partial = False

    def __init__(self, cache: KvCache, partial: PartialPasses | None) -> None:
        self.cache, self._partial = cache, partial

    def begin(self, sequence: Sequence) -> tuple[int, Draft | None]:
        if self._partial is not None and sequence.confirmed is not None:
            draft = self._partial.to_confirm(sequence)
            return sequence.computed, draft
        return sequence.computed, None

    def room(self, sequence: Sequence) -> int:
        return sequence.generation.end - len(sequence.tokens)

    def feeds(self, chunk: int) -> int:
        return chunk

    def program(self, name: str) -> str:
        return name

    def run_ahead(self, sequence: Sequence) -> RunAhead | None:
        return None

    def commit(self, sequence: Sequence, computed: int) -> None:
        sequence.computed = computed


class PartialKvView:
    """The partial cache, where each sequence may add as many tokens as `rooms` says."""

    partial = True

    def __init__(self, passes: PartialPasses, rooms: Mapping[Sequence, int]) -> None:
        self.cache, self._passes, self._rooms = passes.cache, passes, rooms

    def begin(self, sequence: Sequence) -> tuple[int, Draft | None]:
        return self._passes.begin_pass(sequence), None

    def room(self, sequence: Sequence) -> int:
        return self._rooms[sequence]

    def feeds(self, chunk: int) -> int:
        return 1

    def program(self, name: str) -> str:
        return names.partial(name)

    def run_ahead(self, sequence: Sequence) -> RunAhead | None:
        return self._passes.ahead_of(sequence)

    def commit(self, sequence: Sequence, computed: int) -> None:
        """The partial cache counts what it has by itself."""
