"""The noise of the races at the positions after each branch's tip."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.race import RaceKey, exponential, noise_words
from outrider.plugins.schema import Purpose


def race_noise(
    tip_position: NDArray[np.int64],
    seed: NDArray[np.uint64],
    stream: NDArray[np.int64],
    depths: int,
    vocabulary: int,
    purpose: Purpose = Purpose.TARGET,
) -> NDArray[np.float32]:
    """Return noise float32 `[B, depths, vocabulary]`; by the default purpose, that of the races the target will run."""
    ids = np.arange(vocabulary)
    found = [
        [
            exponential(noise_words(ids, RaceKey(int(s), int(r), int(tip) + 1 + depth, purpose)))
            for depth in range(depths)
        ]
        for tip, s, r in zip(tip_position, seed, stream, strict=True)
    ]
    return np.array(found, np.float32).reshape(len(tip_position), depths, vocabulary)
