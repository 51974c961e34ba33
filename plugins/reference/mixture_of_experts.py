"""A layer's experts, to the last bit: each token is computed by those that it chose, and their results are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.plugins.reference.lanes import lanes_exp, ordered_matmul
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


def route(x: Float32, router: Float32, bias: Float32 | None = None, *, top_k: int, normalise: bool) -> Float32:
    """Return the weights `[N, E]` of all experts for tokens x `[N, H]`, 0 of those that a token does not choose.

    A token chooses the `top_k` experts with the largest logits x @ router (+ bias), of equal ones those with the lower
    id. Their weights are softmax over the chosen where `normalise`, else over all: exp of the logit less the largest
    one, over a total in float64, which is added by rank, or by id. One logit that is NaN makes all weights NaN.
    """
    logits = ordered_matmul(x, router)
    if bias is not None:
        logits = logits + bias
    weights = np.zeros(logits.shape, np.float32)
    for row, out in zip(logits, weights, strict=True):
        legible = np.where(np.isnan(row), -np.inf, row).astype(np.float32)
        chosen = np.argsort(-legible, kind="stable")[:top_k]
        with np.errstate(invalid="ignore"):
            shares = lanes_exp(legible - legible[chosen[0]])
            total = np.add.accumulate((shares[chosen] if normalise else shares).astype(np.float64))[-1]
            out[chosen] = shares[chosen].astype(np.float64) / total
        if np.isnan(row).any():
            out[chosen] = np.nan
    return weights
