"""Copy known KV from the prefix cache to sequences, and computed KV of sequences to the prefix cache.

A sequence here is the prefix that all sequences share or, where there is none, each sequence whole.
"""

from __future__ import annotations

from collections import abc

from outrider.plans import names
from outrider.runtime.drafters.drafting import Drafting
from outrider.runtime.kv.cache import KvCache
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.sequence import Sequence
from outrider.runtime.text.common_length import common_length


class CacheClient:
    """Connects a step loop's target, and its drafters with a KV cache, to the prefix cache."""

    def __init__(self, cache: PrefixCache, target: KvCache, drafting: Drafting) -> None:
        self._cache, self._target, self._drafting = cache, target, drafting
        # By number, the owner and tokens of an ended sequence: its row still holds their KV of the target. A drafter's
        # is gone: trees grow in all rows up to the last that is asked for, read or not.
        self._left: dict[int, tuple[str, list[int]]] = {}

    # The prefix that all sequences share.

    def recall_prefix(self, prefix: abc.Sequence[int], owner: str) -> int:
        """Copy the known KV of an owner's prefix that has just begun, for the target and all its drafters; return how
        many tokens have KV.

        A head continues from the feature of a computed token, so at least one token is computed.
        """
        if not prefix:
            return 0
        match, drafters = self._cache.match(prefix, owner), self._drafting.of_prefix
        try:
            tokens = match.lengths.get(names.TARGET, 0)
            for drafter in drafters:
                tokens = min(tokens, max(0, match.lengths.get(drafter.name, 0) - drafter.paired))
            if (states := self._target.states) is not None:
                state = match.state_within(tokens)
                tokens = 0 if state is None else state.end
                if state is not None:
                    states.restore_prefix(state)
            if tokens:
                self._cache.read(match, names.TARGET, 0, tokens, self._target.restore_prefix(tokens))
                for drafter in drafters:
                    place = drafter.cache.restore_prefix(tokens)
                    self._cache.read(match, drafter.name, 0, tokens + drafter.paired, place)
                    drafter.restore_prefix(tokens)
        finally:
            self._cache.release(match)
        self._cache.note_reused(tokens)
        return tokens

    def keep_prefix(self, prefix: abc.Sequence[int], owner: str) -> None:
        """Insert an owner's prefix whose KV has been computed."""
        kept = {names.TARGET: (len(prefix), self._target.prefix_kv())}
        for drafter in self._drafting.of_prefix:
            kept[drafter.name] = len(prefix), drafter.cache.prefix_kv()
        states = self._target.states
        self._cache.insert(prefix, kept, owner, states=() if states is None else (states.prefix,))

    # Sequences after no prefix.

    def number_for(self, tokens: abc.Sequence[int], owner: str, free: abc.Sequence[int]) -> int:
        """Choose the free number whose row holds the most of the owner's `tokens`."""
        tokens = list(tokens)
        return max(free, key=lambda number: (common_length(self._still_held(number, owner), tokens), -number))

    def _still_held(self, number: int, owner: str) -> abc.Sequence[int]:
        """Return the tokens of an ended sequence of this owner if the row still holds their KV: padding of a batch
        overwrites it."""
        left_by, tokens = self._left.get(number, ("", []))
        return tokens if left_by == owner and number not in self._target.filled_rows else []

    def recall(self, sequence: Sequence) -> int:
        """Copy in the KV that the sequence lacks, but for its tip's; return how many tokens of the target were copied.

        What is in the caches already stays where it is.
        """
        tokens, number, owner = sequence.tokens, sequence.number, sequence.generation.request.cache_salt
        match = self._cache.match(tokens, owner)
        try:
            here = max(sequence.computed, common_length(self._still_held(number, owner), tokens))
            self._left.pop(number, None)
            here = min(here, len(tokens) - 1)
            computed = max(min(match.lengths.get(names.TARGET, 0), len(tokens) - 1), here)
            if (states := self._target.states) is not None:
                engine = self._drafting.drafters_of(sequence).engine
                lacking = int(engine is not None and engine.paired)  # features that a head begins with
                known, state = computed, match.state_within(computed - lacking)
                computed = here if state is None else max(here, state.end)
                if state is not None and computed > here:
                    states.restore(number, state)
                states.stop_at(number, known)
            if computed > sequence.computed:
                self._target.claim(number, sequence.computed, computed - sequence.computed)
                self._cache.read(match, names.TARGET, here, computed, self._target.kv_of(number))
                sequence.computed = computed
            if (engine := self._drafting.drafters_of(sequence).engine) is not None:
                known = min(match.lengths.get(engine.name, 0), len(tokens) - 1)
                for first, last, place in engine.restore(sequence, known):
                    self._cache.read(match, engine.name, first, last, place)
        finally:
            self._cache.release(match)
        return computed - here

    def note_reused(self, tokens: int) -> None:
        """Count `tokens` of a recalled sequence as not computed again."""
        self._cache.note_reused(tokens)

    def keep(self, sequence: Sequence, *, wait: bool = True) -> None:
        """Insert the KV of a sequence; without `wait`, only where no other thread holds the cache."""
        kept = {names.TARGET: (sequence.computed, self._target.kv_of(sequence.number))}
        for name, drafter in self._drafting.engine_drafters.items():
            if known := drafter.known(sequence):
                kept[name] = known, drafter.kv_of(sequence)
        states, tokens = self._target.states, sequence.tokens[: sequence.computed]
        kept_states = () if states is None else states.snapshots(sequence.number)
        self._cache.insert(tokens, kept, sequence.generation.request.cache_salt, states=kept_states, wait=wait)

    def leave(self, sequence: Sequence) -> None:
        """Note which KV a sequence that ends leaves in its row."""
        if self._target.stays:
            self._left[sequence.number] = sequence.generation.request.cache_salt, sequence.tokens[: sequence.computed]
            self._target.filled_rows.discard(sequence.number)

    def forget(self) -> None:
        """Forget the KV that sequences have left in their rows."""
        self._left.clear()
