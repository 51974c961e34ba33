"""Function bodies in standard ops, for ops that have no better lowering."""

from __future__ import annotations

import onnx_ir as ir

from compiler.lowering.rule import Lowering, Rule
from plugins.onnx_ops import DOMAIN, FUNCTIONS


class FunctionBody(Rule):
    """Any backend, any number of rows: the op's node stays and gets a function body in standard ops.

    BranchAttention is then TensorScatter + Slice + Attention.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        function = ir.serde.deserialize_function(FUNCTIONS[node.op_type]())
        lowering.model.functions[function.identifier()] = function
