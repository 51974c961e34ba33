"""Arithmetic of layers that kernels of ours compute as one node, in standard ops."""

from __future__ import annotations

from outrider.plugins.schema import ANY_FLOAT, AttributeSpec, OpSchema, TensorSpec

_X, _OUT = (TensorSpec(name, ANY_FLOAT, ("...", "size")) for name in ("x", "out"))
_GATE, _UP = (TensorSpec(name, ANY_FLOAT, ("...", "size")) for name in ("gate", "up"))

UNITS = {"SiluUnit": "silu", "GeluUnit": "gelu_tanh"}
"""Activations of gated units, by op, in the order in which CUDA kernels number them (`csrc/cuda/engine/units.h`)."""

LAYER_OPS = {
    "silu_unit": OpSchema("SiluUnit", 1, "silu(gate) * up.", (_GATE, _UP), (_OUT,)),
    "gelu_unit": OpSchema("GeluUnit", 1, "gelu(gate) * up, with GELU by tanh.", (_GATE, _UP), (_OUT,)),
    "softcap": OpSchema("Softcap", 1, "cap * tanh(x / cap).", (_X,), (_OUT,), (AttributeSpec("cap", float),)),
}
"""Their schemas, by the name of PyTorch's op (`compiler/models/ops.py`): of graphs alone, as of `QUANT_OPS`."""

LAYER_BODIES = {
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
