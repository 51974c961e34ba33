"""Rows of unequal lengths as a rectangle, for engines that need one: padded on the left, with their true lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Alignment:
    """New tokens of a step as a rectangle `[rows, width]`: a row begins with its padding."""

    padding_lengths: NDArray[np.int64]  # [rows]
    valid_lengths: NDArray[np.int64]  # [rows], tokens that are no padding

    @property
    def width(self) -> int:
        return int((self.padding_lengths + self.valid_lengths).max(initial=0))

    @property
    def padding_mask(self) -> NDArray[np.bool_]:
        """bool `[rows, width]`: where a token is no padding."""
        mask: NDArray[np.bool_] = np.arange(self.width) >= self.padding_lengths[:, None]
        return mask

    @property
    def position_offsets(self) -> NDArray[np.int64]:
        """`[rows]`: how far a token's column lies after its place in the row."""
        return self.padding_lengths

    def positions(self, first: Sequence[int]) -> NDArray[np.int64]:
        """Positions int64 `[rows, width]`, the first token of row r being at `first[r]`; 0 for padding."""
        at = np.arange(self.width) - self.position_offsets[:, None] + np.array(first)[:, None]
        return np.where(self.padding_mask, at, 0)


class AlignmentState:
    """Rows padded to the same number of slots: `cache_length`, of which `valid_lengths` are a row's own."""

    def __init__(self, rows: int) -> None:
        self.cache_length = 0
        self.valid_lengths = np.zeros(rows, np.int64)

    def reset(self) -> None:
        """Forget all rows."""
        self.cache_length = 0
        self.valid_lengths[:] = 0

    def open(self, row: int, length: int) -> int:
        """Start a row that has `length` slots of its own; return the padding after them.

        Where it is the longest row, the others are padded to its length.
        """
        self.cache_length = max(self.cache_length, length)
        self.valid_lengths[row] = length
        return self.cache_length - length

    def align(self, lengths: Sequence[int]) -> Alignment:
        """Align a step of `lengths` new tokens in the first rows: all rows get the same number of columns."""
        valid = np.array(lengths, np.int64)
        return Alignment(valid.max(initial=0) - valid, valid)

    def commit(self, alignment: Alignment, kept: Sequence[int] | None = None) -> None:
        """Commit the slots of the step's tokens, or of `kept` of each row after its padding.

        Rows with fewer tokens than others are padded after them.
        """
        stay = alignment.valid_lengths if kept is None else np.array(kept, np.int64)
        self.cache_length += int((alignment.padding_lengths + stay).max(initial=0))
        self.valid_lengths[: len(stay)] += stay
