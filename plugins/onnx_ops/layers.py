"""Arithmetic of layers that kernels of ours compute as one node, in standard ops."""

from __future__ import annotations

from outrider.plugins.schema import ANY_FLOAT, AttributeSpec, OpSchema, TensorSpec

_X, _OUT, _GATE, _UP, _RESIDUAL, _ADDED, _NORMED, _SUM = (
    TensorSpec(name, ANY_FLOAT, ("...", "size"))
    for name in ("x", "out", "gate", "up", "residual", "added", "normed", "sum")
)
_EARLIER = TensorSpec("earlier", ANY_FLOAT, ("...", "width"))
_WEIGHT = TensorSpec("weight", ANY_FLOAT, ("size",))

UNITS = {"SiluUnit": "silu", "GeluUnit": "gelu_tanh"}
"""Activations of gated units, by op, in the order in which CUDA kernels number them (`csrc/cuda/engine/units.h`)."""

LAYER_OPS = (
    OpSchema(
        "AddNorm",
        1,
        "sum = residual + added, and its RMS norm.",
        (_RESIDUAL, _WEIGHT, _ADDED),
        (_NORMED, _SUM),
        (AttributeSpec("epsilon", float),),
    ),
    OpSchema("RunAfter", 1, "x, which is computed after `earlier`.", (_X, _EARLIER), (_OUT,)),
    OpSchema("SiluUnit", 1, "silu(gate) * up.", (_GATE, _UP), (_OUT,)),
    OpSchema("GeluUnit", 1, "gelu(gate) * up, with GELU by tanh.", (_GATE, _UP), (_OUT,)),
    OpSchema("Softcap", 1, "cap * tanh(x / cap).", (_X,), (_OUT,), (AttributeSpec("cap", float),)),
)
"""Their schemas: of graphs alone, as of `QUANT_OPS`."""

LAYER_BODIES = {
    "AddNorm": """
<opset_import: ["" : 24], domain: "outrider">
AddNorm <epsilon> (residual, weight, added) => (normed, sum)
{
    sum = Add (residual, added)
    normed = RMSNormalization <axis: int = -1, epsilon: float = @epsilon> (sum, weight)
}
""",
    "RunAfter": """
<opset_import: ["" : 24], domain: "outrider">
RunAfter (x, earlier) => (out)
{
    wide = Cast <to: int = 1> (earlier)
    sum = ReduceSum <keepdims: int = 0> (wide)
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_float: float = 1.0> ()
    nothing = Mul (sum, zero)
    factor = Add (nothing, one)
    typed = CastLike (factor, x)
    out = Mul (x, typed)
}
""",
    "SiluUnit": """
<opset_import: ["" : 24], domain: "outrider">
SiluUnit (gate, up) => (out)
{
    share = Sigmoid (gate)
    opened = Mul (gate, share)
    out = Mul (opened, up)
}
""",
    "GeluUnit": """
<opset_import: ["" : 24], domain: "outrider">
GeluUnit (gate, up) => (out)
{
    opened = Gelu <approximate: string = "tanh"> (gate)
    out = Mul (opened, up)
}
""",
    "Softcap": """
<opset_import: ["" : 24], domain: "outrider">
Softcap <cap> (x) => (out)
{
    number = Constant <value_float: float = @cap> ()
    most = CastLike (number, x)
    of_most = Div (x, most)
    saturated = Tanh (of_most)
    out = Mul (saturated, most)
}
""",
}
