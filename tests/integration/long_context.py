"""Prompts for sessions after long contexts."""

from __future__ import annotations

import numpy as np


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that repeat themselves here and there, so that n-grams have something to say."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, 300, (4, 5))
    return [int(t) for t in words[rng.integers(0, 4, length)].ravel()[:length]]
