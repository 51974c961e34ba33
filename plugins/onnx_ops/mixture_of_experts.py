"""MixtureOfExperts and its kin in standard ops: dense, every expert for every token."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from outrider.plugins.onnx_ops.domain import DOMAIN, VERSION

_PRODUCTS = ("gate", "up", "down")

_NUMBERS = """
    {0}_table = DequantizeLinear <axis: int = 1, block_size: int = 32> ({0}_integers, {0}_scales)
    {0}_inputs = Shape <start: int = 1, end: int = 2> ({0}_table)
    {0}_shape = Concat <axis: int = 0> (experts_1, last_1, {0}_inputs)
    {0}_by_expert = Reshape ({0}_table, {0}_shape)
    {0} = Transpose <perm: ints = [0, 2, 1]> ({0}_by_expert)
"""
_EXPERTS = """
    experts_1 = Shape <start: int = 2, end: int = 3> (weights)
    last_1 = Constant <value_ints: ints = [-1]> ()
"""
_BIAS = """
    {0}_bias_row = Unsqueeze ({0}_bias, one_1)
    {0}_biased = Add ({0}_product, {0}_bias_row)
"""
_UNIT = """
    share = Sigmoid (gate_product)
    opened = Mul (gate_product, share)
    hidden = Mul (opened, up_product)
"""
_CLAMPED_UNIT = """
    limit = Constant <value_float: float = @limit> ()
    most = CastLike (limit, x)
    least = Neg (most)
    alpha = Constant <value_float: float = @alpha> ()
    slope = CastLike (alpha, x)
    one = Constant <value_float: float = 1.0> ()
    unit = CastLike (one, x)
    low = Min (gate_biased, most)
    up_low = Min (up_biased, most)
    both = Max (up_low, least)
    steeper = Mul (low, slope)
    share = Sigmoid (steeper)
    opened = Mul (low, share)
    more = Add (both, unit)
    hidden = Mul (more, opened)
"""
# A chosen weight that is 0 adds nothing either, and what an expert that was not chosen overflows to is not read.
_SUM = """
    turned = Transpose <perm: ints = [2, 1, 0]> (weights)
    column = CastLike (turned, x)
    zero = Constant <value_float: float = 0.0> ()
    nothing = CastLike (zero, x)
    left_out = Equal (column, nothing)
    weighted = Mul (column, result)
    taken = Where (left_out, nothing, weighted)
    zero_1 = Constant <value_ints: ints = [0]> ()
    out = ReduceSum <keepdims: int = 1> (taken, zero_1)
"""


@cache
def experts_function(name: str) -> onnx.FunctionProto:
    """Return the function body of one of `EXPERT_OPS`."""
    clamped, quantised = name.startswith("Clamped"), "Quant" in name
    body = ["one_1 = Constant <value_ints: ints = [1]> ()"]
    if quantised:
        body += [_EXPERTS, *(_NUMBERS.format(product) for product in _PRODUCTS)]
    body += ["gate_product = MatMul (x, gate)", "up_product = MatMul (x, up)"]
    if clamped:
        body += [_BIAS.format("gate"), _BIAS.format("up"), _CLAMPED_UNIT, "down_product = MatMul (hidden, down)"]
        body += [_BIAS.format("down"), "result = Identity (down_biased)"]
    else:
        body += [_UNIT, "result = MatMul (hidden, down)"]
    attributes = "<alpha, limit>" if clamped else ""
    inputs = ", ".join(given for given, _, _ in _inputs(name))
    text = "\n".join([*body, _SUM])
    return parser.parse_function(
        f'<opset_import: ["" : 24], domain: "{DOMAIN}"> {name} {attributes} ({inputs}) => (out) {{{text}}}'
    )


def experts_schema(name: str) -> defs.OpSchema:
    """Return the schema for ONNX of one of `EXPERT_OPS`; `plugins.expert_schemas` defines its meaning."""
    parameter, attribute = defs.OpSchema.FormalParameter, defs.OpSchema.Attribute
    floats = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
    constraints = [("F", floats, "Model precision."), ("W", ["tensor(float)"], "Weights of experts.")]
    if "Quant" in name:
        constraints.append(("Q", ["tensor(int4)", "tensor(int8)"], "Quantised weights."))
    kinds = defs.OpSchema.AttrType
    return defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc="The sum of what a token's experts make of it.",
        inputs=[parameter(*each) for each in _inputs(name)],
        outputs=[parameter("out", "F", "[1, N, H]")],
        type_constraints=constraints,
        attributes=[
            attribute("alpha", kinds.FLOAT, "slope of the gate's sigmoid"),
            attribute("limit", kinds.FLOAT, "largest gate, and largest magnitude of up"),
        ]
        if name.startswith("Clamped")
        else [],
    )


def _inputs(name: str) -> list[tuple[str, str, str]]:
    """Return the names, types and shapes of an op's inputs."""
    inputs = [("x", "F", "[1, N, H]"), ("weights", "W", "[1, N, E]")]
    for product, (outputs, inward) in zip(_PRODUCTS, (("I", "H"), ("I", "H"), ("H", "I")), strict=True):
        if "Quant" in name:
            inputs.append((f"{product}_integers", "Q", f"[E * {outputs}, {inward}]"))
            inputs.append((f"{product}_scales", "F", f"[E * {outputs}, {inward} / 32]"))
        else:
            inputs.append((product, "F", f"[E, {inward}, {outputs}]"))
    if name.startswith("Clamped"):
        inputs += [(f"{product}_bias", "F", f"[E, {size}]") for product, size in zip(_PRODUCTS, "IIH", strict=True)]
    return inputs
