"""A drafter's quantised weights as numbers, for backends that cannot compile drafts that dequantise."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compiler.graph_edits import drop_unread, replace
from compiler.lowering.rule import Lowering, Rule
from compiler.quantization.form import product_source
from plans import names
from plugins.reference import dequantize


class FloatDrafts(Rule):
    """TensorRT: products and look-ups of a drafter read weights as floats, however the checkpoint stores them.

    TensorRT for RTX 1.7 fails inside on draft graphs that dequantise blocks of 32 inputs, of 4 and of 8 bits. Drafters
    are small, so floats take little.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return "the target's weights stay integers" if lowering.engine == names.TARGET else None

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
