"""Route: the experts of each token, and their weights."""

from __future__ import annotations

import numpy as np

from outrider.plans import names
from outrider.plugins.ops.op import Op
from outrider.plugins.reference.lanes import lanes_exp, ordered_matmul
from outrider.plugins.reference.quantize import Float32
from outrider.plugins.schema import ANY_FLOAT, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Declined

TOKENS = TensorSpec("x", ANY_FLOAT, (1, names.NEW, "hidden"))
WEIGHTS = TensorSpec("weights", "float32", (1, names.NEW, "experts"))

SCHEMA = OpSchema(
    name="Route",
    version=1,
    doc="""The experts of each token, and their weights.

    A token chooses the top_k experts with the largest logits x @ router, of equal ones those with the lower id, and
    gives them weights that are softmax over the chosen where normalise is 1, else over all experts: in float32 at
    any precision of the model. All others have weight 0. Softmax over all, then top-k, then division by the sum is
    the same as softmax over the top-k: normalise 1 is both.
    BiasedRoute has a third input, bias [experts], that is added to the logits.
    Source: Qwen3-MoE (arXiv 2505.09388); Mixtral (arXiv 2401.04088).""",
    inputs=(TOKENS, TensorSpec("router", ANY_FLOAT, ("hidden", "experts"))),
    outputs=(WEIGHTS,),
    attributes=(AttributeSpec("top_k", int), AttributeSpec("normalise", int)),
)


EXPERTS_DECLINED = Declined(
    "standard ops compute every expert; no kernel of ours for GPUs computes the chosen ones alone"
)
OP = Op(SCHEMA, EXPERTS_DECLINED)


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
