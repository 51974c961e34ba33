"""Fusion of the gated unit in a layer's feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from compiler.graph_edits import drop_unread, replace
from compiler.lowering.products import join_products, product_kind, product_width
from compiler.lowering.rule import Lowering, Rule
from compiler.quantization.form import product_source
from plugins.schema import CPU_DOMAIN


class FuseGatedUnit(Rule):
    """onnxruntime-cpu: the products with gate and up become one product, and `silu(gate) * up` one node behind it.

    This saves one start of the thread pool and two dispatches per layer, which counts in small models. Each output
    column is summed as before.
    """

    def pattern(self, node: ir.Node) -> bool:
        return _unit(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        unit = _unit(node)
        assert unit is not None
        gate, up = _product(unit.gate), _product(unit.up)
        if gate is None or up is None:
            return "gate or up is no product with a constant matrix alone"
        if gate.inputs[0] is not up.inputs[0]:
            return "gate and up are products of two values"
        if product_kind(gate) != product_kind(up) or product_width(gate) != product_width(up):
            return "gate and up have other sizes or types"
        if not _is_float32(gate):
            return "its kernel computes in float32"
        activated, shared = unit.activation.outputs[0], unit.sigmoid.outputs[0]
        if len(unit.gate.uses()) != 2 or any(len(x.uses()) != 1 for x in (unit.up, activated, shared)):
            return "a part of the unit is read by others too"
        if any(x in lowering.graph.outputs for x in (unit.gate, unit.up, activated, shared)):
            return "a part of the unit is a result of the graph"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph, unit = lowering.graph, _unit(node)
        assert unit is not None
        gate, up = _product(unit.gate), _product(unit.up)
        assert gate is not None
        assert up is not None
        product = join_products([gate, up], lowering)
        gated = ir.node("SwiGlu", [product.outputs[0]], domain=CPU_DOMAIN)
        graph.insert_before(node, [product, gated])
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
        replace(graph, node, [gated.outputs[0]])
        weights = [*gate.inputs[1:], *up.inputs[1:]]
        for each in (unit.activation, unit.sigmoid, gate, up):
            graph.remove(each, safe=True)
        drop_unread(lowering.graph, weights)


@dataclass(frozen=True)
class _Unit:
    """`activation * up`, where `activation` is `gate * sigmoid(gate)`."""

    gate: ir.Value
    up: ir.Value
    activation: ir.Node
    sigmoid: ir.Node


def _unit(node: ir.Node) -> _Unit | None:
    """Return the gated unit that ends in `node`; None where there is none."""
    if node.op_type != "Mul":
        return None
    for activated, up in (tuple(node.inputs), tuple(reversed(node.inputs))):
        activation = None if activated is None else activated.producer()
        if activation is None or activation.op_type != "Mul" or up is None:
            continue
        for gate, shared in (tuple(activation.inputs), tuple(reversed(activation.inputs))):
            sigmoid = None if shared is None else shared.producer()
            if gate is None or sigmoid is None or sigmoid.op_type != "Sigmoid":
                continue
            if sigmoid.inputs[0] is gate:
                return _Unit(gate, up, activation, sigmoid)
    return None


def _product(value: ir.Value) -> ir.Node | None:
    node = value.producer()
    return None if product_kind(node) is None else node


def _is_float32(product: ir.Node) -> bool:
    """Return whether the weights, or the scales of quantised ones, are of float32."""
    weight = product.inputs[1 if product_source(product) is None else 2]
    return weight is not None and weight.const_value is not None and weight.const_value.dtype == ir.DataType.FLOAT
