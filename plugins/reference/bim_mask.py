"""Visibility of keys to the queries of a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARED_PREFIX = -1
MASKED = np.finfo(np.float32).min


def ancestors(parent: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return `[N, N]`: whether key j is query i or an ancestor of query i."""
    line = np.eye(len(parent), dtype=bool)
    for i, p in enumerate(parent.tolist()):  # parents come first, so their lines are already complete
        if p >= 0:
            line[i] |= line[p]
    return line


def bim_mask(
    bim: NDArray[np.int64],
    past_length: NDArray[np.int64],
    row_splits: NDArray[np.int64],
    branch: NDArray[np.int64],
    parent: NDArray[np.int64],
    view: int,
    places: int,
) -> NDArray[np.float32]:
    """Return the bias f32 `[R, 1, places, view]` of new tokens with `branch` and `parent` `[N]`, split by `row_splits`.

    Row r's tokens stand after the first `past_length[r]` slots of `bim[r]`.
    """
    rows = len(past_length)
    lineage = ancestors(parent)
    visible = np.zeros((rows, places, view), dtype=bool)
    for row, past in enumerate(past_length.tolist()):
        first, end = row_splits[row : row + 2].tolist()
        new = end - first
        committed = bim[row, None, :past]
        visible[row, :new, :past] = (committed == SHARED_PREFIX) | (committed == branch[first:end, None])
        visible[row, :new, past : past + new] = lineage[first:end, first:end]
        visible[row, new:, :1] = True  # padding of the rectangle: key 0 alone, so that no softmax is over nothing
    return np.where(visible, np.float32(0), MASKED)[:, None]


def window_bias(attn_bias: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """Return the bias f32 `[R, 1, S, T]` under which each query sees the last `window` >= 1 keys of those that it sees
    under `attn_bias`.
    """
    visible = attn_bias == 0
    from_here = np.flip(np.cumsum(np.flip(visible, -1), axis=-1), -1)  # keys that are visible, from this one on
    return np.where(visible & (from_here <= window), np.float32(0), MASKED)
