"""Which operators engines that are ONNX graphs may have, read from the file itself: the runtime needs no ONNX package.

A plan may come from anybody. ONNX Runtime would run whatever it knows: loops without an end, draws from random numbers,
decoders of images. So it gets only what our compiler writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plans.errors import PlanError

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
"""Operators that engines may have beside our own: arithmetic of which each ends and says the same every time."""

# Numbers of fields of onnx.proto.
_GRAPH, _FUNCTION = 7, 25  # of a model
_NODE = 1  # of a graph
_NAME, _NODE_WITHIN, _DOMAIN_OF = 1, 7, 10  # of a function
_OP_TYPE, _ATTRIBUTE, _DOMAIN = 4, 5, 7  # of a node
_SUBGRAPHS = (6, 11)  # of an attribute


def check_operators(path: Path) -> None:
    """Raise PlanError where the graph at `path` has an operator that no engine of ours has, or is no graph."""
    try:
        found = operators(path.read_bytes() if path.suffix == ".onnx" else b"\0")  # of other names, it reads others
    except (IndexError, ValueError):
        raise PlanError(f"{path} is not an ONNX graph; build the plan again") from None
    wrong = sorted(f"{domain}.{name}".lstrip(".") for domain, name in found - _KNOWN if domain not in _OURS)
    if wrong:
        raise PlanError(
            f"{path} has operators that no engine of Outrider has: {', '.join(wrong[:5])}; build the plan again"
        )


def operators(model: bytes) -> set[tuple[str, str]]:
    """Return the operators of a model by domain and name, those within its functions and within nodes too.

    Raises ValueError and IndexError for what is no message of protobuf.
    """
    found: set[tuple[str, str]] = set()
    graphs, functions = list[memoryview](), set[tuple[str, str]]()
    for number, value in _fields(memoryview(model)):
        if number == _GRAPH:
            graphs.append(value)
        elif number == _FUNCTION:
            domain = name = ""
            for place, part in _fields(value):
                if place == _NODE_WITHIN:
                    found.add(_operator(part, graphs))
                elif place == _NAME:
                    name = str(part, "utf-8")
                elif place == _DOMAIN_OF:
                    domain = str(part, "utf-8")
            if domain in _STANDARD_DOMAINS:
                raise ValueError("a function in place of an operator")
            functions.add((domain, name))
    while graphs:
        for number, node in _fields(graphs.pop()):
            if number == _NODE:
                found.add(_operator(node, graphs))
    return found - functions


def _operator(node: memoryview, graphs: list[memoryview]) -> tuple[str, str]:
    """Return domain and name of a node; graphs within it are added to `graphs`."""
    domain = name = ""
    for number, value in _fields(node):
        if number == _OP_TYPE:
            name = str(value, "utf-8")
        elif number == _DOMAIN:
            domain = str(value, "utf-8")
        elif number == _ATTRIBUTE:
            graphs += [each for place, each in _fields(value) if place in _SUBGRAPHS]
    return domain, name


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield numbers and contents of a message's fields of a length; others are skipped."""
    at, end = 0, len(message)
    while at < end:
        key, at = _number(message, at)
        if key >= 1 << 32:  # other readers would cut it
            raise ValueError("a number of a field that is too large")
        kind = key & 7
        if kind == 2:
            length, at = _number(message, at)
            if at + length > end:
                raise ValueError("a field that is cut")
            yield key >> 3, message[at : at + length]
            at += length
        elif kind == 0:
            _, at = _number(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("a field of an unknown kind")


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number that is too long")
