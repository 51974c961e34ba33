"""A layer's experts: each token is computed by those that it chose, and their results are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.plugins.reference.quantize import Float32

Product = Callable[[Float32], Float32]
"""Rows `[M, K]` to rows `[M, N]`: a product with weights, and the bias after it if there is one."""


@dataclass(frozen=True)
class Expert:
    """The three products of a gated feed-forward part."""

    gate: Product
    up: Product
    down: Product


def mixture_of_experts(
    x: Float32, weights: Float32, experts: Sequence[Expert], unit: Callable[[Float32, Float32], Float32]
) -> Float32:
    """Return for tokens x `[N, H]` the sum over experts e of `weights[n, e] * down(unit(gate(x), up(x)))`.

    Experts of weight 0 are left out. The others are added in ascending order, one product and one sum at a time, in
    float32.
    """
    out = np.zeros_like(x)
    with np.errstate(invalid="ignore", over="ignore"):
        for e, expert in enumerate(experts):
            (chosen,) = np.nonzero(weights[:, e])
            if len(chosen):
                rows = x[chosen]
                out[chosen] += weights[chosen, e, None] * expert.down(unit(expert.gate(rows), expert.up(rows)))
    return out
