"""The choice of experts for each token, and their weights, to the last bit."""

from __future__ import annotations

import numpy as np

from outrider.plugins.reference.lanes import lanes_exp, ordered_matmul
from outrider.plugins.reference.quantize import Float32


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
