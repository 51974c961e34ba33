"""RMS norms on the CPU: our own op, which adds up squares in one order on any processor."""

from __future__ import annotations

import onnx_ir as ir

from compiler.graph_edits import replace
from compiler.lowering.rule import Lowering, Rule
from plugins.schema import CPU_DOMAIN


class FuseSkipNorms(Rule):
    """onnxruntime-cpu: a residual sum and its RMS norm become one `outrider.cpu.RmsNorm`.

    One pass over the data and one dispatch instead of two.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "Add" and _norm_of(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        norm = _norm_of(node)
        assert norm is not None
        if any(x is None or x.const_value is not None for x in node.inputs):
            return "the sum is no residual: one side is a constant"
        return _reason_against(norm)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        norm = _norm_of(node)
        assert norm is not None
        residual, added = node.inputs
        fused = _rms_norm(norm, [residual, norm.inputs[1], added], lowering)
        lowering.graph.insert_before(node, [fused])
        replace(lowering.graph, norm, [fused.outputs[0]])
        replace(lowering.graph, node, [fused.outputs[1]])


class CpuNorms(Rule):
    """onnxruntime-cpu: other RMS norms become `outrider.cpu.RmsNorm` as well.

    ONNX Runtime's own sums in an order that the processor's vectors decide.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "RMSNormalization"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _reason_against(node)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        norm = _rms_norm(node, list(node.inputs), lowering)
        lowering.graph.insert_before(node, [norm])
        replace(lowering.graph, node, [norm.outputs[0]])


def _rms_norm(norm: ir.Node, inputs: list[ir.Value | None], lowering: Lowering) -> ir.Node:
    lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    return ir.node("RmsNorm", inputs, {"epsilon": epsilon}, domain=CPU_DOMAIN, num_outputs=len(inputs) - 1)


def _norm_of(add: ir.Node) -> ir.Node | None:
    """Return the first RMS norm that reads the output of `add`."""
    return next((u.node for u in add.outputs[0].uses() if u.node.op_type == "RMSNormalization" and u.idx == 0), None)


def _reason_against(norm: ir.Node) -> str | None:
    if norm.attributes.get_int("axis", -1) != -1:
        return "the norm is not over the last dimension alone"
    weight = norm.inputs[1]
    if weight is None or weight.dtype != ir.DataType.FLOAT:
        return "its kernel computes in float32"
    return None
