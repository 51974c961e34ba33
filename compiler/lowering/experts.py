"""Experts and their router as the kernels on the CPU read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.quantization.form import QuantTensor
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.panel_layout import pack_panels, panel_shape
from outrider.plugins.quant_layout import pack
from outrider.plugins.schema import CPU_DOMAIN, EXPERT_OPS

_NOT_FLOAT32 = "its kernels compute in float32"
_NOT_CONSTANT = "its weights are no constants"


class CpuRoute(Rule):
    """onnxruntime-cpu: the router's product and the choice of experts are one node of ours, exact row by row.

    ONNX Runtime's product would have the processor's last bits, which decide between experts that are equally good.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in ("Route", "BiasedRoute")

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _reason_against(node, node.inputs[1:])

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        router = node.inputs[1]
        weight = _constant(router)
        experts = weight.shape.numpy()[1]
        inputs = [node.inputs[0], _panels(router, lowering), *node.inputs[2:]]
        attributes = attributes_of(node) | {"experts": experts}
        lowering.put(node, ir.node("Route", inputs, attributes, domain=CPU_DOMAIN))


class CpuExperts(Rule):
    """onnxruntime-cpu: a layer's experts are one node of ours, which reads the weights of chosen experts alone.

    Its body would compute every expert for every token. Weights are packed in panels, so that a kernel reads them in
    the order in which they lie.
    """

    def pattern(self, node: ir.Node) -> bool:
        return _is_experts(node) and "Quant" not in node.op_type

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _reason_against(node, node.inputs[2:])

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        products, biases = node.inputs[2:5], node.inputs[5:]
        experts, hidden, size = _constant(products[0]).shape.numpy()
        panels = [_panels(product, lowering) for product in products]
        attributes = {"experts": experts, "hidden": hidden, "size": size, **_unit(node)}
        inputs = [*node.inputs[:2], *panels, *biases]
        lowering.put(node, ir.node("MixtureOfExperts", inputs, attributes, domain=CPU_DOMAIN))


class PackExperts(Rule):
    """onnxruntime-cpu: integers and scales of a layer's experts become one array a product, as `PackQuantized` does."""

    def pattern(self, node: ir.Node) -> bool:
        return _is_experts(node) and "Quant" in node.op_type

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        scales = [*node.inputs[3:8:2], *node.inputs[8:]]
        return None if all(x is not None and x.dtype == ir.DataType.FLOAT for x in scales) else _NOT_FLOAT32

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        integers = node.inputs[2:8:2]
        tensors = [_constant(value) for value in integers]
        sources = [tensor.source for tensor in tensors if isinstance(tensor, QuantTensor)]
        assert len(sources) == 3
        wide = any(source.wide for source in sources)
        packed = [_packed(value, wide, lowering) for value in integers]
        (stacked, hidden), size = sources[0].shape, sources[2].shape[1]
        layout = {"bits": sources[0].bits, "wide": int(wide), "minimums": 0}
        attributes = {"experts": stacked // size, "hidden": hidden, "size": size, **layout, **_unit(node)}
        inputs = [*node.inputs[:2], *packed, *node.inputs[8:]]
        lowering.put(node, ir.node("QuantMixtureOfExperts", inputs, attributes, domain=CPU_DOMAIN))


def _is_experts(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in EXPERT_OPS


def _reason_against(node: ir.Node, weights: Sequence[ir.Value | None]) -> str | None:
    constants = [None if value is None else value.const_value for value in weights]
    if any(constant is None for constant in constants):
        return _NOT_CONSTANT
    return None if all(c is not None and c.dtype == ir.DataType.FLOAT for c in constants) else _NOT_FLOAT32


def _unit(node: ir.Node) -> dict[str, float]:
    """Return the attributes of the unit between the products; limit 0: the plain one."""
    return {name: node.attributes.get_float(name, 0.0) for name in ("alpha", "limit")}


def _panels(value: ir.Value | None, lowering: Lowering) -> ir.Value:
    """Return matrices `[E, in, out]`, or one `[in, out]`, in panels."""
    weight = _constant(value)
    *matrices, inputs, outputs = weight.shape.numpy()
    shape = panel_shape(matrices[0] if matrices else 1, inputs, outputs)

    def packed() -> ir.TensorProtocol:
        return ir.tensor(pack_panels(np.asarray(weight.numpy(), np.float32).reshape(-1, inputs, outputs)))

    assert value is not None
    return lowering.deferred(f"{value.name}.panels", ir.LazyTensor(packed, ir.DataType.FLOAT, ir.Shape(shape)))


def _packed(value: ir.Value | None, wide: bool, lowering: Lowering) -> ir.Value:
    tensor = _constant(value)
    assert isinstance(tensor, QuantTensor)
    source = tensor.source
    layout = dataclasses.replace(source.layout, wide=wide)

    def packed() -> ir.TensorProtocol:
        weight = source.read()
        return ir.tensor(pack(weight.integers, weight.scales, weight.minimums, layout))

    assert value is not None
    name = f"{(value.name or '').rpartition('.')[0]}.int{source.bits}"
    return lowering.deferred(name, ir.LazyTensor(packed, ir.DataType.UINT8, ir.Shape([layout.size])))


def _constant(value: ir.Value | None) -> ir.TensorProtocol:
    assert value is not None
    assert value.const_value is not None
    return value.const_value
