"""Which operators engines that are ONNX graphs may have, read from the file itself: the runtime needs no ONNX package.

A plan may come from an untrusted source, and ONNX Runtime would run every operator it knows: endless loops, random
numbers, image decoders. So it gets only operators that our compiler writes.
"""

from __future__ import annotations

from pathlib import Path

from outrider.plans.errors import PlanError
from outrider.plans.protobuf import BYTES, fields

_OURS = ("outrider", "outrider.cpu")
_STANDARD = """
    Abs Add And ArgMax Attention Cast CastLike Ceil Clip Concat Constant ConstantOfShape Cos CumSum
    DequantizeLinear Div DynamicQuantizeLinear Einsum Equal Erf Exp Expand EyeLike Flatten Floor Gather
    GatherElements GatherND Gelu Gemm Greater GreaterOrEqual Identity If IsInf IsNaN LayerNormalization Less
    LessOrEqual Log LogSoftmax MatMul MatMulInteger Max Mean Min Mod Mul Neg NonZero Not OneHot Or Pad Pow
    QuantizeLinear RMSNormalization Range Reciprocal ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd
    ReduceSum Relu Reshape RotaryEmbedding Round ScatterElements ScatterND Shape Sigmoid Sign Sin Size Slice
    Softmax Softplus Split Sqrt Squeeze Sub Sum Swish Tanh TensorScatter Tile TopK Transpose Trilu Unsqueeze Where
    Xor
"""
_CONTRIBUTED = """
    GatherBlockQuantized GroupQueryAttention MatMulNBits SimplifiedLayerNormalization SkipSimplifiedLayerNormalization
"""
_STANDARD_DOMAINS = ("", "ai.onnx", "com.microsoft")
_KNOWN = {
    *((domain, name) for name in _STANDARD.split() for domain in ("", "ai.onnx")),
    *(("com.microsoft", name) for name in _CONTRIBUTED.split()),
}
"""Operators that engines may have beside our own: deterministic arithmetic that always terminates."""

# Fields of onnx.proto.
_GRAPH, _FUNCTION = (7, BYTES), (25, BYTES)  # of a model
_NODE = (1, BYTES)  # of a graph
_NAME, _FUNCTION_NODE, _FUNCTION_DOMAIN = (1, BYTES), (7, BYTES), (10, BYTES)  # of a function
_OP_TYPE, _ATTRIBUTE, _DOMAIN = (4, BYTES), (5, BYTES), (7, BYTES)  # of a node
_SUBGRAPHS = ((6, BYTES), (11, BYTES))  # of an attribute


def check_operators(path: Path) -> None:
    """Raise PlanError where the graph at `path` has an operator that no engine of ours has, or is no graph."""
    try:
        found = operators(path.read_bytes() if path.suffix == ".onnx" else b"\0")  # others have other formats
    except (IndexError, ValueError):
        raise PlanError(f"{path} is not an ONNX graph; build the plan again") from None
    wrong = sorted(f"{domain}.{name}".lstrip(".") for domain, name in found - _KNOWN if domain not in _OURS)
    if wrong:
        raise PlanError(
            f"{path} has operators that no engine of Outrider has: {', '.join(wrong[:5])}; build the plan again"
        )


def operators(model: bytes) -> set[tuple[str, str]]:
    """Return the operators of a model by domain and name, those within its functions and within nodes too.

    Raises ValueError or IndexError for a damaged file.
    """
    found: set[tuple[str, str]] = set()
    graphs, functions = list[memoryview](), set[tuple[str, str]]()
    for field, value in fields(memoryview(model)):
        if field == _GRAPH:
            graphs.append(value)
        elif field == _FUNCTION:
            domain = name = ""
            for inner, part in fields(value):
                if inner == _FUNCTION_NODE:
                    found.add(_operator(part, graphs))
                elif inner == _NAME:
                    name = str(part, "utf-8")
                elif inner == _FUNCTION_DOMAIN:
                    domain = str(part, "utf-8")
            if domain in _STANDARD_DOMAINS:
                raise ValueError("a function in place of an operator")
            functions.add((domain, name))
    while graphs:
        for field, node in fields(graphs.pop()):
            if field == _NODE:
                found.add(_operator(node, graphs))
    return found - functions


def _operator(node: memoryview, graphs: list[memoryview]) -> tuple[str, str]:
    """Return domain and name of a node; graphs within it are added to `graphs`."""
    domain = name = ""
    for field, value in fields(node):
        if field == _OP_TYPE:
            name = str(value, "utf-8")
        elif field == _DOMAIN:
            domain = str(value, "utf-8")
        elif field == _ATTRIBUTE:
            graphs += [each for inner, each in fields(value) if inner in _SUBGRAPHS]
    return domain, name
