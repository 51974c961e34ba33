"""Parents of the new tokens of a step whose rows are several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def flat(parents: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Parents within each row as parents in the step."""
    starts = np.cumsum([0, *(len(parent) for parent in parents[:-1])])
    return np.concatenate([np.where(p < 0, -1, p + start) for p, start in zip(parents, starts, strict=True)])
