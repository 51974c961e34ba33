"""Function bodies in standard ops, for ops that have no better lowering."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.lowering.written_out import sinks_of, softcap_of
from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS
from outrider.plugins.onnx_ops.branch_attention import branch_attention_function


class FunctionBody(Rule):
    """Any backend, any number of rows: the op's node stays and gets a function body in standard ops.

    BranchAttention is then TensorScatter + Slice + Attention, or attention written out where its scores are capped or
    its heads have sinks: another function of the same name, which the node's overload names.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        body = FUNCTIONS[node.op_type]()
        if node.op_type == "BranchAttention":
            body = branch_attention_function(softcap=softcap_of(node) != 0, sinks=sinks_of(node) is not None)
        function = ir.serde.deserialize_function(body)
        node.overload = function.overload
        lowering.model.functions[function.identifier()] = function
