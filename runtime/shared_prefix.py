"""The tokens that all sequences of a step loop begin with, and their KV."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.plans import names
from outrider.runtime.branch_request import Mode
from outrider.runtime.rounds.parts import Parts


class SharedPrefix:
    """A prefix in the loop's caches: the first `computed` of its tokens have KV."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.computed = 0
        self._owner = ""
        self._mode: Mode = "in-one-sequence"

    def begin(self, prefix: list[int], owner: str, mode: Mode) -> bool:
        """Have sequences begin with the owner's `prefix`; whether it is there, and has KV, from the run before."""
        same = (self._parts.prefix, self._owner, self._mode) == (prefix, owner, mode)
        self._parts.prefix, self._owner, self._mode = prefix, owner, mode
        return bool(prefix) and same and self.computed == len(prefix)

    def recall(self) -> int:
        """Copy in what the prefix cache knows of a prefix that has just begun; how many tokens that is."""
        if self._parts.prefix_cache is not None:
            self.computed = self._parts.prefix_cache.recall_prefix(self._parts.prefix, self._owner)
        return self.computed

    def compute(self) -> Iterator[None]:
        """Compute what the prefix lacks of KV, a pass at a time; before each of them, the caller may stop."""
        parts, prefix, began = self._parts, self._parts.prefix, self.computed
        while tokens := prefix[self.computed : self.computed + parts.geometry.prefill_chunk]:
            yield
            parts.cache.begin({})
            parts.cache.append(tokens, self.computed, 0)
            parts.programs[names.PREFILL].run()
            parts.passes += 1
            parts.cache.commit_prefix(len(tokens))
            for drafter in parts.drafting.of_prefix:
                drafter.sync_prefix(self.computed, len(tokens))
            self.computed += len(tokens)
        if parts.prefix_cache is not None and self.computed > began:
            parts.prefix_cache.keep_prefix(prefix, self._owner)
