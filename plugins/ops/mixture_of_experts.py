"""MixtureOfExperts: each token is computed by the experts that it chose, and their results are summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.plans import names
from outrider.plugins.ops.op import Op
from outrider.plugins.ops.route import EXPERTS_DECLINED, TOKENS, WEIGHTS
from outrider.plugins.reference.quantize import Float32
from outrider.plugins.schema import ANY_FLOAT, OpSchema, TensorSpec

_INWARD, _OUTWARD = ("experts", "hidden", "inner"), ("experts", "inner", "hidden")
_PRODUCTS = (
    TensorSpec("gate", ANY_FLOAT, _INWARD),
    TensorSpec("up", ANY_FLOAT, _INWARD),
    TensorSpec("down", ANY_FLOAT, _OUTWARD),
)

SCHEMA = OpSchema(
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
    inputs=(TOKENS, WEIGHTS, *_PRODUCTS),
    outputs=(TensorSpec("out", ANY_FLOAT, (1, names.NEW, "hidden")),),
)

OP = Op(SCHEMA, EXPERTS_DECLINED)


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
