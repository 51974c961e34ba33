"""BranchAttention on the CPU: our own kernel in ONNX Runtime, and what it takes over.

The kernel (`plugins/csrc/onnxruntime`) reads visible keys only, so that a token's result is bit for bit the same
with anything else that the pass computes: alone, in a chain, in a prefill chunk, as a node of a tree, in any row.
"""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of
from outrider.compiler.lowering.builder import sinks_of
from outrider.compiler.lowering.inside import swap
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plans import names
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN

_BIAS, _ROW_SPLITS, _SINKS = 5, 7, 13
_OUTPUTS = 3  # without queries


class CpuAttention(Rule):
    """onnxruntime-cpu: one node appends in place and attends, for any number of ragged rows.

    The node reads only whether a bias is 0: a key is visible or not, as BimMask and draft graphs write it. It caps
    scores and has sinks by itself.

    Where nobody asks, it only appends.

    `com.microsoft.GroupQueryAttention` is slower for one or two tokens, computes one token differently from several,
    and takes only one row where several tokens follow earlier ones.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inputs = [*node.inputs[: _ROW_SPLITS + 1], *[None] * (_SINKS - _ROW_SPLITS - 1), sinks_of(node)]
        if lowering.rows == 1:
            inputs[_ROW_SPLITS] = None  # the one row has all tokens
        attributes = {name: value for name, value in attributes_of(node).items() if name != "later"}
        swap(node, lowering, inputs, attributes | {"epsilon": 0.0}, kind=(CPU_DOMAIN, node.op_type))


class WindowInside(Rule):
    """onnxruntime-cpu: attention under a WindowBias reads the bias after it, and takes each query's last keys itself.

    Keys before a query's window then cost nothing, and layers with and without a window share one bias.
    """

    def pattern(self, node: ir.Node) -> bool:
        return (node.domain, node.op_type) == (CPU_DOMAIN, "BranchAttention") and _window_bias(node) is not None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        windowed = _window_bias(node)
        assert windowed is not None
        inputs = list(node.inputs)
        inputs[_BIAS] = windowed.inputs[0]
        swap(node, lowering, inputs, attributes_of(node) | {"window": windowed.attributes.get_int("window")})


def _window_bias(attention: ir.Node) -> ir.Node | None:
    """Return the WindowBias that makes the bias of `attention`, if one does."""
    bias = attention.inputs[_BIAS]
    made = None if bias is None else bias.producer()
    return made if made is not None and (made.domain, made.op_type) == (DOMAIN, "WindowBias") else None


class QueriesFromInside(Rule):
    """A graph output of queries becomes an output of the attention node, which norms and rotates the queries."""

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == CPU_DOMAIN and node.op_type == "BranchAttention" and len(node.outputs) == _OUTPUTS

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return "nobody asks for its queries" if _asked(node) is None else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        flat = _asked(node)
        assert flat is not None
        graph, output = lowering.graph, flat.outputs[0]
        node.resize_outputs(_OUTPUTS + 1)
        queries = node.outputs[_OUTPUTS]
        queries.type, queries.shape = output.type, output.shape
        place = list(graph.outputs).index(output)
        queries.name, output.name = output.name, None
        graph.outputs[place] = queries
        graph.remove(flat, safe=True)


def _asked(node: ir.Node) -> ir.Node | None:
    """Return the node that drops the first dimension of queries `[1, N, width]` for a graph output; else None."""
    query = node.inputs[0]
    if query is None:
        return None
    for use in query.uses():
        other = use.node
        if other.op_type in ("Squeeze", "Reshape") and (other.outputs[0].name or "").startswith(names.QUERIES):
            return other
    return None
