"""A model's KV of a sequence, by its tokens, wherever it lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenKv:
    """KV in a row of a KV cache: that of tokens `lead` and on lies in order from slot 0, or where `slots` says."""

    def __init__(self, kv: NDArray[np.generic], lead: int = 0, slots: NDArray[np.int64] | None = None) -> None:
        """`kv` is `[planes, heads, capacity, size]`. With `lead` 1, token 0 has none: a head's first is of a pair."""
        self._kv, self._lead, self._slots = kv, lead, slots

    def get(self, start: int, out: NDArray[np.generic]) -> None:
        """Copy the KV of tokens `start` and on to `out` `[planes, heads, tokens, size]`."""
        skipped, where = self._where(start, out.shape[2])
        out[:, :, :skipped] = 0
        out[:, :, skipped:] = self._kv[:, :, where]

    def put(self, start: int, values: NDArray[np.generic]) -> None:
        """Copy KV `[planes, heads, tokens, size]` of tokens `start` and on here."""
        skipped, where = self._where(start, values.shape[2])
        self._kv[:, :, where] = values[:, :, skipped:]

    def _where(self, start: int, count: int) -> tuple[int, slice | NDArray[np.int64]]:
        """Return how many of the tokens have no KV, and the slots of the others."""
        skipped = max(self._lead - start, 0)
        first = start + skipped - self._lead
        place = slice(first, first + count - skipped)
        return skipped, place if self._slots is None else self._slots[place]
