"""The uniform numbers of the positions behind each branch's tip."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.reference.philox import uniform
from plugins.schema import Purpose


def draws(
    tip_position: NDArray[np.int64],
    seed: NDArray[np.uint64],
    stream: NDArray[np.int64],
    depths: int,
    purpose: Purpose = Purpose.TARGET,
) -> NDArray[np.float64]:
    """Return draws float64 `[B, depths]` in [0, 1); by the default purpose, those that the target will choose by."""
    found = [
        [uniform(int(s), int(r), int(tip) + 1 + depth, purpose) / 2**53 for depth in range(depths)]
        for tip, s, r in zip(tip_position, seed, stream, strict=True)
    ]
    return np.array(found, np.float64).reshape(len(tip_position), depths)
