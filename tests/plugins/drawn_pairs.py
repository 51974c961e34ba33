"""Two tokens drawn after one tip, 20,000 times, and their chi-squares: shared by the tests of both accept ops.

The target is a table: its next token depends on the last one alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.reference.choice import filtered_weights, sampling_of

DRAWS = 20_000
TIP = 0
TABLE = np.random.default_rng(11).normal(size=(6, 6)).astype(np.float32)
DRAFTERS = {
    "near": TABLE + np.random.default_rng(12).normal(size=TABLE.shape) * 0.4,
    "flat": np.zeros(TABLE.shape),
    "opposite": -TABLE,
    "sharp": np.eye(6)[:, ::-1] * 4,
    "one-hot": np.where(np.eye(6, dtype=bool)[:, [3, 4, 5, 0, 1, 2]], 0.0, -np.inf),
}
"""More or less like the target."""
FILTERS = [{"temperature": 0.8}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}, {"temperature": 0.9, "min_p": 0.2}]

Step = Callable[[NDArray[np.int64], SamplingSlots, int], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""From tips `[branches]` at a position: the tokens that a step commits, `[branches, most]`, and their counts."""


def decode_two(step: Step, slots: SamplingSlots) -> tuple[NDArray[np.int64], float]:
    """The first two tokens after TIP of each branch `[DRAWS, 2]`, and the share of steps that accepted a draft."""
    committed, count = step(np.full(DRAWS, TIP), slots, 50)
    pairs = committed[:, :2].copy()
    short = np.flatnonzero(count == 1)  # its second token is the next step's first
    of_short = SamplingSlots(**{name: column[short] for name, column in vars(slots).items()})
    pairs[short, 1] = step(pairs[short, 0], of_short, 51)[0][:, 0]
    return pairs, float((count > 1).mean())


def distribution(logits, slots: SamplingSlots, branch=0):
    """p: what the target draws from, filters included."""
    weights = filtered_weights(logits, sampling_of(slots.sampling, branch)).astype(np.float64)
    return weights / weights.sum()


def chi_square(tokens, p):
    """(statistic, degrees of freedom); a token outside the distribution makes it infinite."""
    counts = np.bincount(tokens, minlength=len(p))
    possible = p > 0
    expected = len(tokens) * p[possible]
    statistic = np.inf if counts[~possible].any() else ((counts[possible] - expected) ** 2 / expected).sum()
    return statistic, int(possible.sum()) - 1


def one_in_a_thousand(freedom):
    """The chi-square that is exceeded so often (Wilson and Hilferty's approximation).

    Seeds are fixed, so a test that passes once always does. Wrong rules are to exceed it several times over.
    """
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3


def chi_squares(pairs, slots):
    """Of the first token, and of the second given the first, all firsts together."""
    first = chi_square(pairs[:, 0], distribution(TABLE[TIP], slots))
    given_first = [
        chi_square(pairs[pairs[:, 0] == token, 1], distribution(TABLE[token], slots))
        for token in np.unique(pairs[:, 0])
    ]
    return first, tuple(sum(column) for column in zip(*given_first, strict=True))
