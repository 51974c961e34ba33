"""Ops that are kernels of ours as they are; RMS norms, with the residual sum before them, with one order of sums on any
processor, and as ONNX Runtime's op on CUDA."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of, replace
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN

_NO_RESIDUAL = "the sum is no residual: one side is a constant"


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
            return _NO_RESIDUAL
        return _reason_against(norm)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        norm = _norm_of(node)
        assert norm is not None
        residual, added = node.inputs
        _replace_both(node, norm, _rms_norm(norm, [residual, norm.inputs[1], added]), lowering)


class FuseSkipNormsCuda(FuseSkipNorms):
    """onnxruntime-cuda: a residual sum and its RMS norm become one `com.microsoft.SkipSimplifiedLayerNormalization`.

    One kernel instead of two. It adds up squares in float32 for inputs of any type (in ONNX Runtime 1.31, the
    oldest that runs plans; years before, float16 overflowed in it).
    """

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        norm = _norm_of(node)
        assert norm is not None
        weight = norm.inputs[1]
        if any(x is None or x.const_value is not None for x in node.inputs):
            return _NO_RESIDUAL
        if weight is None or weight.dtype != node.outputs[0].dtype:
            return "the norm's weight is of another type"
        return _reason_against_axis(norm)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        norm = _norm_of(node)
        assert norm is not None
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*node.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            domain=CONTRIBUTED,
            num_outputs=4,  # the second and third are for training
        )
        _replace_both(node, norm, fused, lowering)


class CpuNorms(Rule):
    """onnxruntime-cpu: other RMS norms become `outrider.cpu.RmsNorm` as well.

    ONNX Runtime's own sums in an order that the processor's vectors decide.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "RMSNormalization"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return _reason_against(node)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        lowering.put(node, _rms_norm(node, list(node.inputs)))


def _rms_norm(norm: ir.Node, inputs: list[ir.Value | None]) -> ir.Node:
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    return ir.node("RmsNorm", inputs, {"epsilon": epsilon}, domain=CPU_DOMAIN, num_outputs=len(inputs) - 1)


def _replace_both(add: ir.Node, norm: ir.Node, fused: ir.Node, lowering: Lowering) -> None:
    """Put `fused`, whose first output is the norm and whose last is the sum, where `add` is."""
    lowering.graph.insert_before(add, [fused])
    replace(lowering.graph, norm, [fused.outputs[0]])
    replace(lowering.graph, add, [fused.outputs[-1]])
    lowering.model.opset_imports.setdefault(fused.domain, 1)


def _norm_of(add: ir.Node) -> ir.Node | None:
    """Return the first RMS norm that reads the output of `add`."""
    return next((u.node for u in add.outputs[0].uses() if u.node.op_type == "RMSNormalization" and u.idx == 0), None)


def _reason_against(norm: ir.Node) -> str | None:
    weight = norm.inputs[1]
    if weight is None or weight.dtype != ir.DataType.FLOAT:
        return "its kernel computes in float32"
    return _reason_against_axis(norm)


def _reason_against_axis(norm: ir.Node) -> str | None:
    return None if norm.attributes.get_int("axis", -1) == -1 else "the norm is not over the last dimension alone"


class OwnKernels(Rule):
    """Ops that have kernels of ours of the same name and inputs: on the CPU one node instead of a body's many.

    A drafter's engine runs on small tensors, where starting a node costs more than computing it.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type in ("PathConv", "Softcap", "TreeExpand", "TreeRerank")

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        count, attributes = len(node.outputs), attributes_of(node)
        lowering.put(node, ir.node(node.op_type, node.inputs, attributes, domain=CPU_DOMAIN, num_outputs=count))
