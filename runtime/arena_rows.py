"""The rows of a model that stand for a sequence, by its tokens, wherever they lie."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Rows(Protocol):
    """The rows of one model that stand for a sequence, wherever they lie: row j is that of token j."""

    def get(self, start: int, out: NDArray[np.generic]) -> None:
        """Copy the rows of tokens `start` and on to `out` `[planes, heads, tokens, size]`."""

    def put(self, start: int, rows: NDArray[np.generic]) -> None:
        """Copy such rows here."""


class ArenaRows:
    """A row of a model's arena whose slot j is that of token `lead` + j: of a sequence that has the row to itself."""

    def __init__(self, kv: NDArray[np.generic], lead: int = 0) -> None:
        """`kv` is `[planes, heads, capacity, size]`. With `lead` 1, token 0 has no row: a head's first is of a pair."""
        self._kv, self._lead = kv, lead

    def get(self, start: int, out: NDArray[np.generic]) -> None:
        skipped = max(self._lead - start, 0)
        first = start + skipped - self._lead
        out[:, :, :skipped] = 0
        out[:, :, skipped:] = self._kv[:, :, first : first + out.shape[2] - skipped]

    def put(self, start: int, rows: NDArray[np.generic]) -> None:
        skipped = max(self._lead - start, 0)
        first = start + skipped - self._lead
        self._kv[:, :, first : first + rows.shape[2] - skipped] = rows[:, :, skipped:]


class ScatteredRows:
    """Rows that lie wherever `slots` int64 `[rows]` says, of tokens from `lead` on."""

    def __init__(self, kv: NDArray[np.generic], slots: NDArray[np.int64], lead: int = 0) -> None:
        self._kv, self._slots, self._lead = kv, slots, lead

    def get(self, start: int, out: NDArray[np.generic]) -> None:
        skipped = max(self._lead - start, 0)
        first = start + skipped - self._lead
        out[:, :, :skipped] = 0
        out[:, :, skipped:] = self._kv[:, :, self._slots[first : first + out.shape[2] - skipped]]

    def put(self, start: int, rows: NDArray[np.generic]) -> None:
        skipped = max(self._lead - start, 0)
        first = start + skipped - self._lead
        self._kv[:, :, self._slots[first : first + rows.shape[2] - skipped]] = rows[:, :, skipped:]
