"""Fusion of residual sums with the norms that read them."""

from __future__ import annotations

import onnx_ir as ir

from compiler.graph_edits import replace
from compiler.lowering.rule import Lowering, Rule


class FuseSkipNorms(Rule):
    """onnxruntime-cpu: a residual sum and its RMS norm become `com.microsoft.SkipSimplifiedLayerNormalization`.

    One pass over the data and one dispatch instead of two. The fused op adds up the squares in another order than the
    norm alone (about 1e-6 of a logit), but token by token, so that a token's bits do not depend on the other tokens.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "Add" and _norm_of(node) is not None

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        norm = _norm_of(node)
        assert norm is not None
        if any(x is None or x.const_value is not None for x in node.inputs):
            return "the sum is no residual: one side is a constant"
        if norm.attributes.get_int("axis", -1) != -1:
            return "the norm is not over the last dimension alone"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        norm = _norm_of(node)
        assert norm is not None
        residual, added = node.inputs
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [added, residual, norm.inputs[1]],
            {"epsilon": norm.attributes.get_float("epsilon", 1e-5)},
            domain="com.microsoft",
            num_outputs=4,
        )
        fused.outputs[1].name = fused.outputs[2].name = ""  # mean and inverse deviation, which nothing reads
        lowering.graph.insert_before(node, [fused])
        replace(lowering.graph, norm, [fused.outputs[0]])
        replace(lowering.graph, node, [fused.outputs[3]])


def _norm_of(add: ir.Node) -> ir.Node | None:
    """Return the first RMS norm that reads the output of `add`."""
    return next((u.node for u in add.outputs[0].uses() if u.node.op_type == "RMSNormalization" and u.idx == 0), None)
