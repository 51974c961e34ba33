"""A model's KV of a sequence, by its tokens, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.kv.memory import KvMemory


class TokenKv:
    """KV in a row of a KV cache: that of tokens `lead` and on lies in order from slot 0, or where `slots` says."""

    def __init__(self, kv: KvMemory, lead: int = 0, slots: NDArray[np.int64] | None = None) -> None:
        """With `lead` 1, token 0 has none: a head's first is of a pair."""
        self._kv, self._lead, self._slots = kv, lead, slots

    def get(self, start: int, count: int, to: KvMemory, at: int) -> None:
        """Copy the KV of `count` tokens from `start` on to the slots of `to` from `at` on; those of tokens that have
        none stay as they are."""
        for token, slot, length in self._pieces(start, count):
            to.copy(at + token - start, self._kv, slot, length)

    def put(self, start: int, count: int, source: KvMemory, at: int) -> None:
        """Copy KV of `count` tokens from `start` on here, from the slots of `source` from `at` on."""
        for token, slot, length in self._pieces(start, count):
            self._kv.copy(slot, source, at + token - start, length)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield tokens whose slots lie side by side: the first token, its slot, and how many."""
        token, end = max(start, self._lead), start + count
        if token >= end:
            return
        if self._slots is None:
            yield token, token - self._lead, end - token
            return
        slots = self._slots[token - self._lead : end - self._lead]
        cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        for first, stop in pairwise(cuts):
            yield token + first, int(slots[first]), stop - first
