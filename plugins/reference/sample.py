"""One choice per new token with logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.choice import choice, sampling_of
from outrider.plugins.reference.race import RaceKey
from outrider.plugins.schema import Purpose


@dataclass(frozen=True)
class SamplingSlots:
    """Settings `[B, SETTINGS]` and random streams `[B]` of all branches; dtypes as in the schema of Sample."""

    sampling: NDArray[np.float64]
    seed: NDArray[np.uint64]
    stream: NDArray[np.int64]

    def key(self, branch: int, position: int, purpose: Purpose) -> RaceKey:
        """Return the race for the token after `position`: a race is numbered by the token that it draws."""
        return RaceKey(int(self.seed[branch]), int(self.stream[branch]), position + 1, purpose)

    def choose(self, logits: NDArray[np.float32], branch: int, position: int, purpose: Purpose) -> int:
        """Choose the token after `position` from `logits`."""
        return choice(logits, sampling_of(self.sampling, branch), self.key(branch, position, purpose))


def sample(
    logits: NDArray[np.float32],
    logit_indices: NDArray[np.int64],
    positions: NDArray[np.int64],
    branch: NDArray[np.int64],
    slots: SamplingSlots,
    purpose: Purpose = Purpose.TARGET,
) -> NDArray[np.int64]:
    """Choose tokens int64 `[M]` from `logits` `[M, V]` at `logit_indices`; `positions` and `branch` are `[N]`."""
    chosen = [
        slots.choose(logits[m], int(branch[row]), int(positions[row]), purpose) for m, row in enumerate(logit_indices)
    ]
    return np.array(chosen, dtype=np.int64)
