"""Function bodies without control flow, for what records its kernels once and launches them again."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.functions import FunctionBody
from outrider.compiler.lowering.rule import Lowering
from outrider.compiler.lowering.sizes import copy_sizes


class UnbranchedBody(FunctionBody):
    """ONNX Runtime on CUDA, which waits for the device at an If and records no graph that has one.

    The function bodies are those of `FunctionBody`, but for their Ifs, of which both branches are computed, and Where
    picks, and for their sizes (`CopiedSizes`).
    """

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        super().rewrite(node, lowering)
        function = lowering.model.functions[node.op_identifier()]
        unbranch(function)
        copy_sizes(function)


def unbranch(function: ir.Function) -> None:
    """Compute both branches of every If of `function`, whose outputs must be of one shape, and pick between them."""
    while branching := [node for node in function if node.op_type == "If"]:
        for node in branching:
            picked = zip(_hoisted(node, "then_branch"), _hoisted(node, "else_branch"), node.outputs, strict=True)
            wheres = [ir.Node("", "Where", [node.inputs[0], *of], outputs=[_like(value)]) for *of, value in picked]
            values = [where.outputs[0] for where in wheres]
            ir.convenience.replace_nodes_and_values(function, node, [node], wheres, node.outputs, values)


def _hoisted(node: ir.Node, branch: str) -> list[ir.Value]:
    """Move the nodes of a branch before the If; return the branch's outputs."""
    graph = node.attributes[branch].as_graph()
    nodes, outputs = list(graph), list(graph.outputs)
    graph.outputs.clear()
    graph.remove(nodes)
    assert node.graph is not None
    node.graph.insert_before(node, nodes)
    return outputs


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, shape=value.shape, type=value.type)
