"""Rotated queries, where a plan keeps them, as an output of the attention node that rotates them."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plans import names
from outrider.plugins.schema import CPU_DOMAIN

_OUTPUTS = 3  # outputs of attention without queries


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
