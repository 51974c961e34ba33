"""Fewer and larger products: projections of one input become one MatMul."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compiler.lowering.rule import Lowering, Rule, replace


class FuseProjections(Rule):
    """Products of one value with three weights or more (q, k and v) become one MatMul and a Split.

    A small model's step is dispatch and weight traffic: one product streams the same weights with fewer starts of the
    thread pool. Each output column is summed as before, so no bit changes. With two products (gate and up) the Split
    costs at least as much as the saved start.
    """

    def pattern(self, node: ir.Node) -> bool:
        siblings = _projections_of(node)
        return len(siblings) > 2 and siblings[0] is node

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph = lowering.graph
        siblings = _projections_of(node)
        weights = [_weight(sibling) for sibling in siblings]
        fused = np.concatenate([weight.numpy() for weight in weights], axis=1)
        name = "+".join(str(sibling.inputs[1].name) for sibling in siblings if sibling.inputs[1])
        sizes = np.array([weight.numpy().shape[1] for weight in weights], np.int64)
        product = ir.node("MatMul", [node.inputs[0], lowering.constant(name, ir.tensor(fused))])
        split = ir.node(
            "Split",
            [product.outputs[0], lowering.constant("split." + ".".join(map(str, sizes)), ir.tensor(sizes))],
            {"axis": -1},
            num_outputs=len(siblings),
        )
        graph.insert_before(node, [product, split])
        for sibling, part in zip(siblings, split.outputs, strict=True):
            unfused = sibling.inputs[1]
            replace(graph, sibling, [part])
            if unfused is not None and not unfused.uses():
                del graph.initializers[unfused.name or ""]


def _projections_of(node: ir.Node) -> list[ir.Node]:
    """Return all products of the input of `node` with constant matrices, in graph order; none if `node` is not one."""
    if not _is_projection(node) or node.inputs[0] is None or node.graph is None:
        return []
    users = {use.node for use in node.inputs[0].uses() if use.idx == 0 and _is_projection(use.node)}
    return [candidate for candidate in node.graph if candidate in users]


def _is_projection(node: ir.Node) -> bool:
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return False
    weight = node.inputs[1].const_value
    return weight is not None and len(weight.shape) == 2


def _weight(node: ir.Node) -> ir.TensorProtocol:
    assert node.inputs[1] is not None
    assert node.inputs[1].const_value is not None
    return node.inputs[1].const_value
