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
    """onnxruntime-cpu: `silu(gate) * up` becomes one node, and the products with gate and up before it one product.

    The node is ours, and has the same bits on every processor. One product saves one start of the thread pool and two
    dispatches per layer, which counts in small models; each output column is summed as before. Products of different
    kinds, or with biases behind them, stay two, whose results are laid side by side.
    """

    def pattern(self, node: ir.Node) -> bool:
        return _unit(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        unit = _unit(node)
        assert unit is not None
        gate, up = _product(unit.gate), _product(unit.up)
        if gate is None or up is None:
            return "gate or up is no product with a constant matrix"
        if product_width(gate) != product_width(up):
            return "gate and up have other sizes"
        if not (_is_float32(gate) and _is_float32(up)):
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
        joins = gate is unit.gate.producer() and up is unit.up.producer() and gate.inputs[0] is up.inputs[0]
        joins = joins and product_kind(gate) == product_kind(up)
        both = join_products([gate, up], lowering) if joins else ir.node("Concat", [unit.gate, unit.up], {"axis": -1})
        gated = ir.node("SwiGlu", [both.outputs[0]], domain=CPU_DOMAIN)
        graph.insert_before(node, [both, gated])
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
        replace(graph, node, [gated.outputs[0]])
        weights = [*gate.inputs[1:], *up.inputs[1:]]
        for each in (unit.activation, unit.sigmoid, *((gate, up) if joins else ())):
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
    """Return the product that `value` is, or is but for a constant bias."""
    node = value.producer()
    if node is not None and node.op_type == "Add":
        biased, bias = node.inputs
        if bias is not None and bias.const_value is None:
            biased, bias = bias, biased
        if biased is None or bias is None or bias.const_value is None or len(bias.const_value.shape) != 1:
            return None
        node = biased.producer()
    return None if product_kind(node) is None else node


def _is_float32(product: ir.Node) -> bool:
    """Return whether the weights, or the scales of quantised ones, are of float32."""
    weight = product.inputs[1 if product_source(product) is None else 2]
    return weight is not None and weight.const_value is not None and weight.const_value.dtype == ir.DataType.FLOAT
