"""BranchAttention on the CPU: our own kernel in ONNX Runtime.

The kernel (`plugins/csrc/onnxruntime`) reads visible keys only, so that a token's result is bit for bit the same
whatever else the pass computes: alone, in a chain, in a prefill chunk, as a node of a tree, in any row.
"""

from __future__ import annotations

import onnx_ir as ir

from compiler.lowering.inside import swap
from compiler.lowering.rule import Lowering, Rule
from plugins.onnx_ops import DOMAIN
from plugins.schema import CPU_DOMAIN

_INPUTS = 13


class CpuAttention(Rule):
    """onnxruntime-cpu: one node appends in place and attends, for any number of ragged rows.

    The node reads only whether a bias is 0: a key is visible or not, as BimMask and draft graphs write it.

    Where nobody asks, it only appends.

    `com.microsoft.GroupQueryAttention` is slower for one or two tokens, computes one token differently from several,
    and takes only one row where several tokens follow earlier ones.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inputs = list(node.inputs)
        if lowering.rows == 1:
            inputs[-1] = None  # the one row has all tokens
        attributes = {name: attribute.value for name, attribute in node.attributes.items() if name != "later"}
        attributes["epsilon"] = 0.0
        swap(node, lowering, [*inputs, *[None] * (_INPUTS - len(inputs))], attributes, kind=(CPU_DOMAIN, node.op_type))
