"""Quantised weights as the kernels on the CPU read them."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import drop_unread, replace
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.quantization.form import product_source
from outrider.plugins.quant_layout import pack
from outrider.plugins.schema import CPU_DOMAIN


class PackQuantized(Rule):
    """onnxruntime-cpu: integers and scales become one array, in the order in which `outrider.cpu.QuantMatMul` reads it.

    A row's product is then a function of the row alone, with the same bits on any processor. All nodes that read a
    matrix read the same array.
    """

    def pattern(self, node: ir.Node) -> bool:
        return product_source(node) is not None and _readers(node)[0] is node

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        scales = node.inputs[2]
        assert scales is not None
        return None if scales.dtype == ir.DataType.FLOAT else "its kernels compute in float32"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        source, integers = product_source(node), node.inputs[1]
        assert source is not None
        assert integers is not None
        layout = source.layout

        def packed() -> ir.TensorProtocol:
            weight = source.read()
            return ir.tensor(pack(weight.integers, weight.scales, weight.minimums, layout))

        name = f"{(integers.name or '').rpartition('.')[0]}.int{source.bits}"
        constant = lowering.deferred(name, ir.LazyTensor(packed, ir.DataType.UINT8, ir.Shape([layout.size])))
        for reader in _readers(node):
            new = ir.node(
                reader.op_type.removeprefix("Asymmetric"),
                [reader.inputs[0], constant],
                layout.attributes,
                domain=CPU_DOMAIN,
            )
            weights = reader.inputs[1:]
            lowering.graph.insert_before(reader, [new])
            replace(lowering.graph, reader, [new.outputs[0]])
            drop_unread(lowering.graph, weights)
        lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)


def _readers(node: ir.Node) -> list[ir.Node]:
    assert node.inputs[1] is not None
    return [use.node for use in node.inputs[1].uses()]
