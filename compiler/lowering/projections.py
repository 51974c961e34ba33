"""Fewer and larger products: projections of one input become one product."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread, replace
from outrider.compiler.lowering.products import join_products, product_kind, product_width
from outrider.compiler.lowering.rule import Lowering, Rule


class FuseProjections(Rule):
    """Products of one value with three matrices or more (q, k and v) become one product and a Split.

    A small model's step is dispatch and weight traffic: one product streams the same weights with fewer starts of the
    thread pool, and quantises its row once. Each output column is summed as before, so no bit changes. With two
    products (gate and up) the Split costs at least as much as the saved start.
    """

    def pattern(self, node: ir.Node) -> bool:
        siblings = _projections_of(node)
        return len(siblings) > 2 and siblings[0] is node

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph = lowering.graph
        siblings = _projections_of(node)
        sizes = np.array([product_width(sibling) for sibling in siblings], np.int64)
        product = join_products(siblings, lowering)
        split = ir.node(
            "Split",
            [product.outputs[0], lowering.constant("split." + ".".join(map(str, sizes)), ir.tensor(sizes))],
            {"axis": -1},
            num_outputs=len(siblings),
        )
        graph.insert_before(node, [product, split])
        for sibling, part in zip(siblings, split.outputs, strict=True):
            weights = sibling.inputs[1:]
            replace(graph, sibling, [part])
            drop_unread(lowering.graph, weights)


def _projections_of(node: ir.Node) -> list[ir.Node]:
    """Return all products of the input of `node` that are of its kind, in graph order; none if it is no product."""
    kind = product_kind(node)
    if kind is None or node.inputs[0] is None or node.graph is None:
        return []
    users = {use.node for use in node.inputs[0].uses() if use.idx == 0 and product_kind(use.node) == kind}
    return [candidate for candidate in node.graph if candidate in users]
