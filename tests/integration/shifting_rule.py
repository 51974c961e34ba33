"""A rule that depends on every token of the path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.text.rules import LogitsRule


class Shifting(LogitsRule):
    """Excludes a quarter of the vocabulary, by the tokens so far, and lowers the last two."""

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        ids = np.arange(len(logits))
        logits[(7 * ids + sum(path) + len(path)) % 4 == 0] = -np.inf
        logits[list(path[-2:])] -= 4
