"""Products with quantised weights, and look-ups in quantised tables, in standard ops.

Each comes twice: with a scale for each block of 32 inputs, or with a minimum as well (formats with zero points). The
bodies multiply in floating point; only the kernels of `outrider.cpu` quantise the other factor too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import onnx
from onnx import parser

from outrider.plugins.onnx_ops.domain import DOMAIN
from outrider.plugins.schema import ANY_FLOAT, INTEGER, OpSchema, TensorSpec

_SCALED = """
    table = DequantizeLinear <axis: int = 1, block_size: int = 32> (weight, scales)
"""
_WITH_MINIMUMS = """
    last_1 = Constant <value_ints: ints = [-1]> ()
    steps = DequantizeLinear <axis: int = 1, block_size: int = 32> (weight, scales)
    shape = Shape (steps)
    shape_of_scales = Shape (scales)
    by_block = Concat <axis: int = 0> (shape_of_scales, last_1)
    blocks = Reshape (steps, by_block)
    least = Unsqueeze (minimums, last_1)
    shifted = Add (blocks, least)
    table = Reshape (shifted, shape)
"""
_PRODUCT = """
    turned = Transpose <perm: ints = [1, 0]> (table)
    out = MatMul (x, turned)
"""
_LOOKUP = """
    out = Gather (table, ids)
"""


@cache
def quant_function(name: str) -> onnx.FunctionProto:
    """Return the function body of one of `QUANT_OPS`."""
    minimums = ", minimums" if name.startswith("Asymmetric") else ""
    first, last = ("ids", _LOOKUP) if name.endswith("Gather") else ("x", _PRODUCT)
    body = (_WITH_MINIMUMS if minimums else _SCALED) + last
    return parser.parse_function(
        f'<opset_import: ["" : 24], domain: "{DOMAIN}"> {name} ({first}, weight, scales{minimums}) => (out) {{{body}}}'
    )


def quant_op(name: str) -> OpSchema:
    """Return the schema of one of `QUANT_OPS`."""
    asymmetric, lookup = name.startswith("Asymmetric"), name.endswith("Gather")
    scales = TensorSpec("scales", ANY_FLOAT, ("N", "K / 32"))
    inputs = (
        TensorSpec("ids", INTEGER, ("...",)) if lookup else TensorSpec("x", ANY_FLOAT, ("...", "K")),
        TensorSpec("weight", "uint4 | uint8" if asymmetric else "int4 | int8", ("N", "K")),
        scales,
        *((replace(scales, name="minimums"),) if asymmetric else ()),  # the numbers that integer 0 stands for
    )
    doc = "Rows of quantised weights, as numbers." if lookup else "A product with the transpose of quantised weights."
    return OpSchema(name, 1, doc, inputs, (TensorSpec("out", ANY_FLOAT, ("...", "K" if lookup else "N")),))
