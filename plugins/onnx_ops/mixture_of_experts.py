"""MixtureOfExperts and its kin in standard ops: dense, every expert for every token."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import onnx
from onnx import parser

from outrider.plugins.onnx_ops.domain import DOMAIN
from outrider.plugins.ops import OPS
from outrider.plugins.schema import ANY_FLOAT, AttributeSpec, OpSchema, TensorSpec

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
    inputs = ", ".join(spec.name for spec in experts_op(name).inputs)
    text = "\n".join([*body, _SUM])
    return parser.parse_function(
        f'<opset_import: ["" : 24], domain: "{DOMAIN}"> {name} {attributes} ({inputs}) => (out) {{{text}}}'
    )


def experts_op(name: str) -> OpSchema:
    """Return the schema of one of `EXPERT_OPS`."""
    schema = OPS["MixtureOfExperts"].schema
    tokens, weights, *products = schema.inputs
    if "Quant" in name:
        products = [
            spec
            for product in _PRODUCTS
            for spec in (
                TensorSpec(f"{product}_integers", "int4 | int8", ("experts * outputs", "inputs")),
                TensorSpec(f"{product}_scales", ANY_FLOAT, ("experts * outputs", "inputs / 32")),
            )
        ]
    inputs: tuple[TensorSpec, ...] = (tokens, weights, *products)
    attributes: tuple[AttributeSpec, ...] = ()
    if name.startswith("Clamped"):
        inputs += tuple(TensorSpec(f"{product}_bias", ANY_FLOAT, ("experts", "outputs")) for product in _PRODUCTS)
        attributes = AttributeSpec("alpha", float), AttributeSpec("limit", float)
    return replace(schema, name=name, inputs=inputs, attributes=attributes)
