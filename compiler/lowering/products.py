"""Products with constant matrices, of numbers or quantised: which may become one, and how; those of q, k and v, and of
gate and up, which do."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread, given, replace
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.quantization.form import product_source, side_by_side
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.onnx_ops.layers import UNITS
from outrider.plugins.schema import CPU_DOMAIN


def product_kind(node: ir.Node | None) -> Hashable:
    """Return what products of one value must share to become one; None where `node` is no such product."""
    if node is None or node.inputs[0] is None:
        return None
    if node.op_type.endswith("QuantMatMul"):
        source = product_source(node)
        return None if source is None else (node.op_type, source.bits)
    if node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    weight = node.inputs[1].const_value
    return None if weight is None or len(weight.shape) != 2 else weight.dtype


def product_width(node: ir.Node) -> int:
    """Return the number of outputs of a product."""
    source = product_source(node)
    return source.shape[0] if source is not None else _weight(node).shape.numpy()[1]


def join_products(products: Sequence[ir.Node], lowering: Lowering) -> ir.Node:
    """Return a product, not in the graph yet, whose outputs are those of `products` one after another.

    All are of the same value and kind. Each output is summed as before, so no bit changes.
    """
    first = products[0]
    names = [str(product.inputs[1].name) for product in products if product.inputs[1] is not None]
    sources = [source for product in products if (source := product_source(product)) is not None]
    if not sources:
        joined = _side_by_side([_weight(product) for product in products])
        return ir.node("MatMul", [first.inputs[0], lowering.deferred("+".join(names), joined)])
    stem = "+".join(name.rpartition(".")[0] for name in names)
    dtype = given(first.inputs)[2].dtype
    assert dtype is not None
    parts = [lowering.deferred(f"{stem}.{tensor.part}", tensor) for tensor in side_by_side(sources).tensors(dtype)]
    return ir.node(first.op_type, [first.inputs[0], *parts], domain=DOMAIN)


def _side_by_side(weights: Sequence[ir.TensorProtocol]) -> ir.LazyTensor:
    """Return matrices `[in, out]` of one input and type as one: their outputs one after another."""

    def read() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([weight.numpy() for weight in weights], axis=1), dtype=weights[0].dtype)

    inputs, outputs = weights[0].shape.numpy()[0], sum(weight.shape.numpy()[1] for weight in weights)
    return ir.LazyTensor(read, weights[0].dtype, ir.Shape([inputs, outputs]))


def _weight(product: ir.Node) -> ir.TensorProtocol:
    weight = given(product.inputs)[1].const_value
    assert weight is not None
    return weight


class FuseProjections(Rule):
    """Products of one value with three matrices or more (q, k and v) become one product and a Split.

    A schedule of this backend, found here and not exported: the model's arithmetic is independent products, and types
    of weights are per tensor (checkpoints and `quantize` mix them), so that only after them it is known which can be
    one.
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


class GatedUnitOfProduct(Rule):
    """onnxruntime-cpu: a gated unit is one node of ours, and its products with gate and up are one product before it.

    One product saves one start of the thread pool and two dispatches per layer, which counts in small models; each
    output column is summed as before. Products of different kinds, or with biases after them, stay two, whose results
    are laid side by side.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in UNITS

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        products = [each for value in given(node.inputs) if (each := value.producer()) is not None]
        kinds = {product_kind(each) for each in products}
        joined = len(kinds) == 1 and None not in kinds and products[0].inputs[0] is products[1].inputs[0]
        both = join_products(products, lowering) if joined else ir.node("Concat", node.inputs, {"axis": -1})
        lowering.graph.insert_before(node, [both])
        activation = {"activation": UNITS[node.op_type]}
        lowering.put(node, ir.node("GatedUnit", both.outputs, activation, domain=CPU_DOMAIN))
        for each in products if joined else ():
            weights = each.inputs[1:]
            lowering.graph.remove(each, safe=True)
            drop_unread(lowering.graph, weights)
