"""Fusion of the gated unit in a layer's feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread
from outrider.compiler.lowering.products import join_products, product_kind, product_width
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.quantization.form import product_source
from outrider.plugins.schema import CPU_DOMAIN


class FuseGatedUnit(Rule):
    """onnxruntime-cpu: `silu(gate) * up`, or that of GELU by tanh, becomes one node, and the products with gate and up
    before it one product.

    The node is ours, and has the same bits on every processor. One product saves one start of the thread pool and two
    dispatches per layer, which counts in small models; each output column is summed as before. Products of different
    kinds, or with biases after them, stay two, whose results are laid side by side.
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
        inner = [unit.up, *(each.outputs[0] for each in unit.activation)]
        if len(unit.gate.uses()) != len(unit.activation) or any(len(x.uses()) != 1 for x in inner):
            return "a part of the unit is read by others too"
        if any(x in lowering.graph.outputs for x in (unit.gate, *inner)):
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
        gated = ir.node("GatedUnit", [both.outputs[0]], {"activation": unit.name}, domain=CPU_DOMAIN)
        graph.insert_before(node, [both])
        lowering.put(node, gated)
        weights = [*gate.inputs[1:], *up.inputs[1:]]
        for each in (*unit.activation, *((gate, up) if joins else ())):
            graph.remove(each, safe=True)
        drop_unread(lowering.graph, weights)


@dataclass(frozen=True)
class _Unit:
    """`activation * up`: the activation's name in the op, and its nodes, last first, each of which reads the gate."""

    gate: ir.Value
    up: ir.Value
    name: str
    activation: tuple[ir.Node, ...]


def _unit(node: ir.Node) -> _Unit | None:
    """Return the gated unit that ends in `node`; None where there is none."""
    if node.op_type != "Mul":
        return None
    for activated, up in (tuple(node.inputs), tuple(reversed(node.inputs))):
        activation = None if activated is None else activated.producer()
        if activation is None or up is None:
            continue
        if (unit := _silu(activation, up) or _gelu(activation, up)) is not None:
            return unit
    return None


def _silu(activation: ir.Node, up: ir.Value) -> _Unit | None:
    """Return the unit of `gate * sigmoid(gate)`."""
    if activation.op_type != "Mul":
        return None
    for gate, shared in (tuple(activation.inputs), tuple(reversed(activation.inputs))):
        sigmoid = None if shared is None else shared.producer()
        if gate is not None and sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is gate:
            return _Unit(gate, up, "silu", (activation, sigmoid))
    return None


def _gelu(activation: ir.Node, up: ir.Value) -> _Unit | None:
    """Return the unit of `gelu(gate)` by tanh; the exact one, by the error function, has no kernel of ours."""
    gate = activation.inputs[0] if activation.op_type == "Gelu" else None
    if gate is None or activation.attributes.get_string("approximate", "none") != "tanh":
        return None
    return _Unit(gate, up, "gelu_tanh", (activation,))


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
