"""Sizes of tensors as ONNX Runtime's CUDA provider can keep them."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from outrider.compiler.lowering.rule import Lowering, Rule


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


def copy_sizes(nodes: Iterable[ir.Node]) -> None:
    """Do the same to the nodes of a function body."""
    for node in [node for node in nodes if is_view_of_size(node)]:
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
        outputs=[ir.Value(name=out.name, shape=out.shape, type=out.type)],
    )  # fmt: skip
    ir.convenience.replace_nodes_and_values(owner, node, [node], [first, gather], [out], [gather.outputs[0]])
