"""Function bodies in standard ops, for ops that have no better lowering, and what CUDA needs of them."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.builder import sinks_of, softcap_of
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS
from outrider.plugins.onnx_ops.branch_attention import branch_attention_function


class FunctionBody(Rule):
    """Any backend, any number of rows: the op's node stays and gets a function body in standard ops.

    BranchAttention is then TensorScatter + Slice + Attention, or attention written out where its scores are capped or
    its heads have sinks: another function of the same name, which the node's overload names.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        body = FUNCTIONS[node.op_type]()
        if node.op_type == "BranchAttention":
            body = branch_attention_function(softcap=softcap_of(node) != 0, sinks=sinks_of(node) is not None)
        function = ir.serde.deserialize_function(body)
        node.overload = function.overload
        lowering.model.functions[function.identifier()] = function


class UnbranchedBody(FunctionBody):
    """ONNX Runtime on CUDA, which waits for the device at an If and records no graph that has one.

    The function bodies are those of `FunctionBody`, but for their Ifs, of which both branches are computed, and Where
    picks, and for their sizes (`CopiedSizes`).
    """

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        super().rewrite(node, lowering)
        function = lowering.model.functions[node.op_identifier()]
        unbranch(function)
        for view in [each for each in function if is_view_of_size(each)]:
            copy_size(view)


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


class CopiedSizes(Rule):
    """ONNX Runtime on CUDA, which frees a Shape's result too early if a node of the CPU makes a view of it.

    Shape is a node of the device and its result lies on the CPU; Squeeze is a node of the CPU and its result shares the
    Shape's memory. ONNX Runtime 1.31 plans memory for each of the two apart, and gives the Shape's to the next Shape
    while the Squeeze's result is still read: sizes of blocks after several tips came out as those of another tensor.
    Gather copies.
    """

    def pattern(self, node: ir.Node) -> bool:
        return is_view_of_size(node)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        copy_size(node)


def is_view_of_size(node: ir.Node) -> bool:
    made = node.inputs[0].producer() if node.op_type == "Squeeze" and node.inputs[0] is not None else None
    if made is None or (made.domain, made.op_type) != ("", "Shape"):
        return False
    return made.attributes.get_int("end", 0) - made.attributes.get_int("start", 0) == 1  # one size


def copy_size(node: ir.Node) -> None:
    """Replace a Squeeze of a Shape, whose result has one element."""
    out, owner = node.outputs[0], node.graph
    assert owner is not None
    first = ir.Node("", "Constant", [], [ir.AttrInt64("value_int", 0)])
    gather = ir.Node(
        "", "Gather", [node.inputs[0], first.outputs[0]], [ir.AttrInt64("axis", 0)],
        outputs=[_like(out)],
    )  # fmt: skip
    ir.convenience.replace_nodes_and_values(owner, node, [node], [first, gather], [out], [gather.outputs[0]])
