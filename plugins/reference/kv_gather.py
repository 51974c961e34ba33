"""Compact slots of a KV cache in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def kv_gather(
    kv: NDArray[Any],
    source: NDArray[np.int64],
    row_splits: NDArray[np.int64],
    source_base: NDArray[np.int64],
    destination: NDArray[np.int64],
) -> None:
    """Move the slots of new tokens `source` within their rows of `kv` `[planes, R, heads, capacity, head_dim]`.

    In the order of `source`, the token at place s of row r moves from slot source_base[r] + s to the next slot from
    destination[r] on.
    """
    following = destination.copy()
    for token in source.tolist():
        row = int(np.searchsorted(row_splits, token, side="right")) - 1
        kv[:, row, :, following[row]] = kv[:, row, :, source_base[row] + token - row_splits[row]]
        following[row] += 1
