"""The last keys of those that each query sees."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.bim_mask import MASKED


def window_bias(attn_bias: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """Return the bias f32 `[R, 1, S, T]` under which each query sees the last `window` >= 1 keys of those that it sees
    under `attn_bias`.
    """
    visible = attn_bias == 0
    from_here = np.flip(np.cumsum(np.flip(visible, -1), axis=-1), -1)  # keys that are visible, from this one on
    return np.where(visible & (from_here <= window), np.float32(0), MASKED)
