"""Who sees whom in a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHARED_PREFIX = -1
MASKED = np.finfo(np.float32).min


def ancestors(parent: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`[N, N]`: whether key j is query i or an ancestor of it."""
    line = np.eye(len(parent), dtype=bool)
    for i, p in enumerate(parent.tolist()):  # parents come first, so their lines are complete
        if p >= 0:
            line[i] |= line[p]
    return line


def bim_mask(
    bim: NDArray[np.int64], past_length: int, branch: NDArray[np.int64], parent: NDArray[np.int64], view: int
) -> NDArray[np.float32]:
    """The bias float32 `[1, 1, N, view]` of new tokens `branch`, `parent` `[N]` behind `past_length` rows of `bim`."""
    new = len(branch)
    committed = bim[None, :past_length]
    visible = np.zeros((new, view), dtype=bool)
    visible[:, :past_length] = (committed == SHARED_PREFIX) | (committed == branch[:, None])
    visible[:, past_length : past_length + new] = ancestors(parent)
    return np.where(visible, np.float32(0), MASKED)[None, None]
