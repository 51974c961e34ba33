"""Fusion of the gated unit in a layer's feed-forward part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compiler.lowering.rule import Lowering, Rule, replace
from plugins.onnxruntime_ops import CPU_DOMAIN


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
        if _weight(gate).shape != _weight(up).shape or _weight(gate).dtype != ir.DataType.FLOAT:
            return "gate and up have other sizes, or are not of float32"
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
        both = np.concatenate([_weight(gate).numpy(), _weight(up).numpy()], axis=1)
        name = f"{_name(gate)}+{_name(up)}"
        product = ir.node("MatMul", [gate.inputs[0], lowering.constant(name, ir.tensor(both))])
        gated = ir.node("SwiGlu", [product.outputs[0]], domain=CPU_DOMAIN)
        graph.insert_before(node, [product, gated])
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
        replace(graph, node, [gated.outputs[0]])
        weights = [each.inputs[1] for each in (gate, up)]
        for each in (unit.activation, unit.sigmoid, gate, up):
            graph.remove(each, safe=True)
        for weight in weights:
            if weight is not None and not weight.uses():
                del graph.initializers[weight.name or ""]


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
    if node is None or node.op_type != "MatMul" or node.inputs[1] is None:
        return None
    weight = node.inputs[1].const_value
    return node if weight is not None and len(weight.shape) == 2 else None


def _weight(product: ir.Node) -> ir.TensorProtocol:
    weight = product.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    return weight.const_value


def _name(product: ir.Node) -> str:
    weight = product.inputs[1]
    assert weight is not None
    return str(weight.name)
