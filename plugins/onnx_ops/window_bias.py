"""WindowBias in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from outrider.plugins.onnx_ops.domain import DOMAIN, VERSION

# `from_here` counts the visible keys from a key on; in int32, which every backend adds up exactly.
_WINDOW_BIAS = """
<opset_import: ["" : 24], domain: "outrider">
WindowBias <window> (attn_bias) => (window_bias)
{
    keys_axis = Constant <value_int: int = 3> ()
    zero = Constant <value_float: float = 0.0> ()
    hidden = Constant <value_float: float = -3.4028234663852886e38> ()
    most_wide = Constant <value_int: int = @window> ()
    most = Cast <to: int = 6> (most_wide)
    visible = Equal (attn_bias, zero)
    counted = Cast <to: int = 6> (visible)
    from_here = CumSum <reverse: int = 1> (counted, keys_axis)
    within = LessOrEqual (from_here, most)
    kept = And (visible, within)
    window_bias = Where (kept, zero, hidden)
}
"""


@cache
def window_bias_function() -> onnx.FunctionProto:
    """Return the function body of WindowBias."""
    return parser.parse_function(_WINDOW_BIAS)


def window_bias_schema() -> defs.OpSchema:
    """Return the op's schema for ONNX; `plugins.schemas` defines its meaning."""
    parameter, attribute = defs.OpSchema.FormalParameter, defs.OpSchema.Attribute
    return defs.OpSchema(
        "WindowBias",
        DOMAIN,
        VERSION,
        doc="The bias under which each query sees the last keys of those that it sees.",
        inputs=[parameter("attn_bias", "B", "[R, 1, S, T], 0 where a key is visible")],
        outputs=[parameter("window_bias", "B", "[R, 1, S, T], 0 or the lowest number")],
        type_constraints=[("B", ["tensor(float)"], "Biases are in float32.")],
        attributes=[attribute("window", defs.OpSchema.AttrType.INT, "visible keys that stay visible, at least 1")],
    )
