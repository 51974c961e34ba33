"""Products with quantised weights, and look-ups in quantised tables, in standard ops.

Each comes twice: with a scale for each block of 32 inputs, or with a minimum as well (formats with zero points). The
bodies multiply in floating point; only the kernels of `outrider.cpu` quantise the other factor too.
"""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from outrider.plugins.onnx_ops.domain import DOMAIN, VERSION

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


def quant_schema(name: str) -> defs.OpSchema:
    """Return the schema for ONNX of one of `QUANT_OPS`."""
    parameter = defs.OpSchema.FormalParameter
    asymmetric, lookup = name.startswith("Asymmetric"), name.endswith("Gather")
    inputs = [
        parameter("ids", "I", "indices of rows") if lookup else parameter("x", "F", "[..., K]"),
        parameter("weight", "W", "[N, K]"),
        parameter("scales", "F", "[N, K / 32]"),
    ]
    if asymmetric:
        inputs.append(parameter("minimums", "F", "[N, K / 32], what integer 0 stands for"))
    kinds = ["tensor(uint4)", "tensor(uint8)"] if asymmetric else ["tensor(int4)", "tensor(int8)"]
    constraints = [
        ("F", [f"tensor({kind})" for kind in ("float", "float16", "bfloat16")], "Model precision."),
        ("W", kinds, "Quantised weights."),
    ]
    if lookup:
        constraints.append(("I", ["tensor(int64)"], "Indices."))
    return defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc="Rows of quantised weights, as numbers."
        if lookup
        else "A product with the transpose of quantised weights.",
        inputs=inputs,
        outputs=[parameter("out", "F", "[..., K]" if lookup else "[..., N]")],
        type_constraints=constraints,
    )
