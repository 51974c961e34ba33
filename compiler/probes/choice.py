"""Which ops of an engine are probed, and which need not be."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of, given
from outrider.compiler.probes.ops import ExpertSizes, Weight, extent, sizes_of, weight_of
from outrider.plans import names
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN

_APART = {
    "": {
        *("Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Gather", "GatherElements", "Identity", "Range"),
        *("Reshape", "ScatterElements", "Shape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
        *("Where", "And", "Equal", "Less", "Mod", "Not", "Or", "Add", "Div", "Mul", "Neg", "Sub"),
    },
    CPU_DOMAIN: {"PathConv", "QuantGather"},
    DOMAIN: {"WindowBias"},
}
"""Ops that move or compare numbers, or round each step of an element by itself: a row of theirs has no company."""

_PROPOSING = {  # in drafters
    "": {"CumSum", "Log", "ReduceSum"},
    DOMAIN: {"DraftSample"},
    CPU_DOMAIN: {"TreeExpand", "TreeRerank"},
}
"""Ops by which a drafter turns logits into proposals, once a tip. They are not probed: proposals change no token."""

_ROW_OPS = {"RmsNorm", "RMSNormalization", "GatedUnit", "Softcap", "Gelu", "Sigmoid", "Tanh"}
_WIDTH = 1000
"""Elements of rows that go through an op element by element, where it does not stand after a product."""


@dataclass(frozen=True)
class ProbedOp:
    """An op of the engine `engine`: `node` stands for all that equal it but for their weights' values.

    `width` is that of its rows. `family` is what ops share that differ in columns alone.
    """

    engine: str
    node: ir.Node
    width: int
    family: Hashable
    columns: int
    shape: str

    @property
    def text(self) -> str:
        """The op for the reader: `target: MatMul [320, 1664]`."""
        return f"{self.engine}: {self.node.op_type} {self.shape}"


def probed_ops(engines: Mapping[str, ir.Model]) -> list[ProbedOp]:
    """Return the ops of lowered graphs of onnxruntime-cpu on which bits of a row depend, no two alike.

    Raises `ValueError` for an op of which this file does not know.
    """
    found: dict[Hashable, ProbedOp] = {}
    for engine, model in engines.items():
        for op in _ops_of(engine, model.graph):
            found.setdefault((op.family, op.columns), op)
    return list(found.values())


def widest(ops: Iterable[ProbedOp]) -> list[ProbedOp]:
    """Return the ops without those that have fewer columns than another of their family."""
    found: dict[Hashable, ProbedOp] = {}
    for op in ops:
        if op.family not in found or op.columns > found[op.family].columns:
            found[op.family] = op
    return list(found.values())


def _ops_of(engine: str, graph: ir.Graph) -> Iterator[ProbedOp]:
    passed = (_APART,) if engine == names.TARGET else (_APART, _PROPOSING)
    for node in graph:
        weight, kind = weight_of(node), (node.domain, node.op_type)
        if weight is not None:
            yield _product(engine, node, weight)
        elif kind == (CPU_DOMAIN, "BranchAttention"):
            yield _attention(engine, node)
        elif kind == (CPU_DOMAIN, "Route"):
            yield _route(engine, node)
        elif (sizes := sizes_of(node)) is not None:
            yield _experts(engine, node, sizes)
        elif node.op_type in _ROW_OPS:
            yield _row_op(engine, node)
        elif not any(node.op_type in ops.get(node.domain, ()) for ops in passed):
            raise ValueError(f"engine {engine}: nobody has said whether rows of {node.op_type} depend on each other")


def _product(engine: str, node: ir.Node, weight: Weight) -> ProbedOp:
    family: tuple[Hashable, ...] = (node.op_type, weight.inputs, weight.axis)
    shape = str([weight.columns, weight.inputs] if weight.axis == 0 else [weight.inputs, weight.columns])
    if weight.layout is not None:
        family = (*family, replace(weight.layout, outputs=0))
        shape += f" of {weight.layout.bits} bits"
    return ProbedOp(engine, node, weight.inputs, family, weight.columns, shape)


def _attention(engine: str, node: ir.Node) -> ProbedOp:
    attributes, cache = attributes_of(node), node.inputs[3]
    assert cache is not None
    size, read = extent(cache, 3), tuple(value is not None for value in node.inputs)
    family = (node.op_type, tuple(sorted(attributes.items())), cache.dtype, size, read, len(node.outputs))
    kind = "" if cache.dtype is None else cache.dtype.name.lower()
    text = f"[{attributes['num_heads']} heads, {attributes['kv_num_heads']} of keys, slots of {size} {kind}]"
    return ProbedOp(engine, node, 0, family, 0, text)


def _route(engine: str, node: ir.Node) -> ProbedOp:
    constant = given(node.inputs[:2])[1].const_value
    assert constant is not None
    width, attributes = int(constant.shape.numpy()[2]), attributes_of(node)
    family = (node.op_type, tuple(sorted(attributes.items())), width, len(node.inputs))
    return ProbedOp(engine, node, width, family, attributes["experts"], f"[{width}, {attributes['experts']}]")


def _experts(engine: str, node: ir.Node, sizes: ExpertSizes) -> ProbedOp:
    attributes = attributes_of(node)
    family = (node.op_type, tuple(sorted(attributes.items())), len(node.inputs))
    kind = f" of {attributes['bits']} bits" if "bits" in attributes else ""
    text = f"[{sizes.experts} experts, {sizes.hidden} by {sizes.inner}]{kind}"
    return ProbedOp(engine, node, sizes.hidden, family, 3 * sizes.inner, text)


def _row_op(engine: str, node: ir.Node) -> ProbedOp:
    constant = next((v.const_value for v in node.inputs if v is not None and v.const_value is not None), None)
    producer = None if node.inputs[0] is None else node.inputs[0].producer()
    product = None if producer is None else weight_of(producer)
    width = _WIDTH
    if constant is not None:
        width = int(constant.shape.numpy()[-1])
    elif product is not None:
        width = product.columns
    attributes = tuple(sorted(attributes_of(node).items()))
    text = f"[{width}]" + (" of a sum" if len(node.inputs) > 2 else "")
    return ProbedOp(engine, node, width, (node.op_type, attributes, len(node.inputs), width), 0, text)
