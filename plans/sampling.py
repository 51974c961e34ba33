"""How a branch chooses its tokens, as one row of numbers. `plugins/csrc/choice.h` declares the same columns."""

from __future__ import annotations

from typing import NamedTuple


class Sampling(NamedTuple):
    """A row of `sampling`, float64 `[branches, SETTINGS]`, or of a drafter's `draft_sampling`, the same in float32.

    Each column has the default at which it is off. Whole numbers above 2**53, in float32 2**24, are rounded: as top_k
    all of them are off, since every vocabulary is smaller.
    """

    temperature: float = 0.0  # what logits are divided by; 0 is greedy, and the filters are then without effect
    top_k: float = 0  # a whole number: keep the k most probable tokens, ties at the cut included; 0 is off
    top_p: float = 1.0  # keep the most probable tokens up to the one that crosses this share of them all
    min_p: float = 0.0  # keep the tokens that are at least this share as probable as the most probable one
    filter_order: float = 0  # 0: the temperature before the filters, 1: after them
    top_n_sigma: float = 0.0  # keep the tokens at most this many standard deviations below the largest logit; 0 is off


SETTINGS = len(Sampling._fields)

NOBODY = 2**32
"""The branch of tokens that fill up a step: nothing is chosen for them. `plugins/csrc/sample.h` declares it too."""
