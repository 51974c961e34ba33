"""BranchAttention as one node of ours that norms, rotates and attends; for other backends what comes before attending
as nodes before one that attends alone."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of
from outrider.compiler.lowering.builder import Builder, around, is_asked_for_queries
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN

_ROW_SPLITS = 7


class CpuAttention(Rule):
    """onnxruntime-cpu: one node norms, rotates, appends in place and attends, for any number of ragged rows.

    The kernel (`plugins/csrc/onnxruntime`) reads visible keys only, so that a token's result is bit for bit the same
    with anything else that the pass computes: alone, in a chain, in a prefill chunk, as a node of a tree, in any row.
    The node reads only whether a bias is 0: a key is visible or not, as BimMask and draft graphs write it. Keys before
    a query's window cost nothing. Where nobody asks, it only appends.

    `com.microsoft.GroupQueryAttention` is slower for one or two tokens, computes one token differently from several,
    and takes only one row where several tokens follow earlier ones.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        sinks, *others = around(node)
        inputs = [*packed(node.inputs[:3]), *node.inputs[3 : _ROW_SPLITS + 1], *others, sinks]
        if lowering.rows == 1:
            inputs[_ROW_SPLITS] = None  # the one row has all tokens
        attributes = {name: value for name, value in attributes_of(node).items() if name != "later"}
        outputs = 4 if is_asked_for_queries(node) else 3
        node.resize_outputs(outputs)
        lowering.put(node, ir.node(node.op_type, inputs, attributes, domain=CPU_DOMAIN, num_outputs=outputs))


class AroundAttention(Rule):
    """TensorRT, ONNX Runtime on CUDA without GroupQueryAttention, readers of standard ops: norms, rotation and window
    are nodes before a BranchAttention that attends alone."""

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        build, (sinks, *_) = Builder(lowering), around(node)
        q, k = build.queries_and_keys(node)
        inputs = [q, k, *node.inputs[2:5], build.windowed(node), *node.inputs[6 : _ROW_SPLITS + 1]]
        attributes = {name: v for name, v in attributes_of(node).items() if name not in ("window", "epsilon")}
        inputs += [] if sinks is None else [sinks]
        alone = ir.node(node.op_type, inputs, attributes, domain=DOMAIN, num_outputs=3)
        build.put(node, alone)


def packed(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return q, k and v; where they are all that one Split makes, what it splits, without k and v."""
    split = None if values[0] is None else values[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == list(values):
        return [split.inputs[0], None, None]
    return list(values)
