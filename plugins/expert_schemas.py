"""Schemas of the ops of a mixture of experts: they stand in graphs only."""

from __future__ import annotations

from outrider.plans import names
from outrider.plugins.schema import ANY_FLOAT, AttributeSpec, OpSchema, TensorSpec

_TOKENS = TensorSpec("x", ANY_FLOAT, (1, names.NEW, "hidden"))
_WEIGHTS = TensorSpec("weights", "float32", (1, names.NEW, "experts"))
_INWARD, _OUTWARD = ("experts", "hidden", "inner"), ("experts", "inner", "hidden")
_PRODUCTS = (
    TensorSpec("gate", ANY_FLOAT, _INWARD),
    TensorSpec("up", ANY_FLOAT, _INWARD),
    TensorSpec("down", ANY_FLOAT, _OUTWARD),
)

ROUTE = OpSchema(
    name="Route",
    version=1,
    doc="""The experts of each token, and their weights.

    A token chooses the top_k experts with the largest logits x @ router, of equal ones those with the lower id, and
    gives them weights that are softmax over the chosen where normalise is 1, else over all experts: in float32 at
    any precision of the model. All others have weight 0. Softmax over all, then top-k, then division by the sum is
    the same as softmax over the top-k: normalise 1 is both.
    BiasedRoute has a third input, bias [experts], that is added to the logits.
    Source: Qwen3-MoE (arXiv 2505.09388); Mixtral (arXiv 2401.04088).""",
    inputs=(_TOKENS, TensorSpec("router", ANY_FLOAT, ("hidden", "experts"))),
    outputs=(_WEIGHTS,),
    attributes=(AttributeSpec("top_k", int), AttributeSpec("normalise", int)),
)

MIXTURE_OF_EXPERTS = OpSchema(
    name="MixtureOfExperts",
    version=1,
    doc="""The sum over experts e of weights[n, e] * down_e(silu(gate_e(x)) * up_e(x)).

    Experts whose weight is 0 are left out; the others are added in ascending order.
    ClampedMixtureOfExperts, with attributes alpha and limit, has biases gate_bias, up_bias [experts, inner] and
    down_bias [experts, hidden] after the products, and another unit: (up + 1) * gate * sigmoid(alpha * gate), gate at
    most limit and up from -limit to limit.
    QuantMixtureOfExperts and ClampedQuantMixtureOfExperts have integers and scales in place of each product's weights,
    the transposed matrices of the experts one under another: [experts * outputs, inputs] and
    [experts * outputs, inputs / 32].
    The function body computes all experts for all tokens, and takes those out that a token did not choose: for one
    token, experts / top_k times the work and the memory traffic of the CPU kernel, which reads chosen experts alone.
    Source: Qwen3-MoE (arXiv 2505.09388); gpt-oss (arXiv 2508.10925) for the clamped unit.""",
    inputs=(_TOKENS, _WEIGHTS, *_PRODUCTS),
    outputs=(TensorSpec("out", ANY_FLOAT, (1, names.NEW, "hidden")),),
)
