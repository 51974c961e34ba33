"""A drafter's quantised weights as numbers, for backends that cannot compile drafts that dequantise."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread, replace
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.quantization.form import QuantTensor, product_source
from outrider.plans import names
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.reference import dequantize
from outrider.plugins.schema import EXPERT_OPS

_OF_TARGETS = "the target's weights stay integers"


class FloatDrafts(Rule):
    """TensorRT: products and look-ups of a drafter read weights as floats, however the checkpoint stores them.

    TensorRT for RTX 1.7 fails inside on draft graphs that dequantise blocks of 32 inputs, of 4 and of 8 bits. Drafters
    are small, so floats take little.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _OF_TARGETS if lowering.engine == names.TARGET else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        source, integers, scales = product_source(node), node.inputs[1], node.inputs[2]
        assert source is not None
        assert integers is not None
        assert scales is not None
        assert scales.dtype is not None
        dtype, lookup = scales.dtype, node.op_type.endswith("Gather")

        def numbers() -> ir.TensorProtocol:
            weight = source.read()
            table = dequantize(weight.integers, weight.scales, weight.minimums)
            return ir.Tensor(np.ascontiguousarray(table if lookup else table.T).astype(dtype.numpy()), dtype=dtype)

        (n, k), stem = source.shape, (integers.name or "").rpartition(".")[0]
        name, shape = (f"{stem}.table", (n, k)) if lookup else (f"{stem}.numbers", (k, n))
        weight = lowering.deferred(name, ir.LazyTensor(numbers, dtype, ir.Shape(shape)))
        old, x = node.inputs[1:], node.inputs[0]
        new = ir.node("Gather", [weight, x], {"axis": 0}) if lookup else ir.node("MatMul", [x, weight])
        lowering.graph.insert_before(node, [new])
        replace(lowering.graph, node, [new.outputs[0]])
        drop_unread(lowering.graph, old)


class FloatDraftExperts(Rule):
    """TensorRT: experts of a drafter read weights as floats too, as `FloatDrafts` has them."""

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in EXPERT_OPS and "Quant" in node.op_type

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _OF_TARGETS if lowering.engine == names.TARGET else None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        first, last = 2, 8  # integers and scales of gate, up and down
        parts = node.inputs[first:last]
        widths = [part.shape[1] for part in parts[::2] if part is not None and part.shape is not None]
        hidden, _, inner = (int(width) for width in widths)  # type: ignore[arg-type]
        weights = [
            _stacked(lowering, integers, scales, outputs)
            for integers, scales, outputs in zip(parts[::2], parts[1::2], (inner, inner, hidden), strict=True)
        ]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        kind = node.op_type.replace("Quant", "")
        new = ir.node(kind, [*node.inputs[:first], *weights, *node.inputs[last:]], attributes, domain=DOMAIN)
        lowering.graph.insert_before(node, [new])
        replace(lowering.graph, node, [new.outputs[0]])
        drop_unread(lowering.graph, parts)


def _stacked(lowering: Lowering, integers: ir.Value | None, scales: ir.Value | None, outputs: int) -> ir.Value:
    """Return the numbers `[E, in, out]` of integers `[E * out, in]` and their scales."""
    assert integers is not None
    assert scales is not None
    assert scales.dtype is not None
    tensor, dtype = integers.const_value, scales.dtype
    assert isinstance(tensor, QuantTensor)
    source = tensor.source
    rows, inputs = source.shape

    def numbers() -> ir.TensorProtocol:
        weight = source.read()
        table = dequantize(weight.integers, weight.scales).reshape(-1, outputs, inputs)
        return ir.Tensor(np.ascontiguousarray(table.transpose(0, 2, 1)).astype(dtype.numpy()), dtype=dtype)

    name = f"{(integers.name or '').rpartition('.')[0]}.numbers"
    return lowering.deferred(name, ir.LazyTensor(numbers, dtype, ir.Shape([rows // outputs, inputs, outputs])))
