"""BranchAttention on the CPU: our own kernel in ONNX Runtime.

The kernel (`plugins/csrc/onnxruntime`) reads visible keys only, so that a token's result is bit for bit the same
whatever else the pass computes: alone, in a chain, in a prefill chunk, as a node of a tree, in any row.
"""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.inside import swap
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.compiler.lowering.written_out import sinks_of
from outrider.plugins.onnx_ops import DOMAIN
from outrider.plugins.schema import CPU_DOMAIN

_BIAS, _ROW_SPLITS, _SINKS = 5, 7, 13


class CpuAttention(Rule):
    """onnxruntime-cpu: one node appends in place and attends, for any number of ragged rows.

    The node reads only whether a bias is 0: a key is visible or not, as BimMask and draft graphs write it. It caps
    scores and has sinks by itself.

    Where nobody asks, it only appends.

    `com.microsoft.GroupQueryAttention` is slower for one or two tokens, computes one token differently from several,
    and takes only one row where several tokens follow earlier ones.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inputs = [*node.inputs[: _ROW_SPLITS + 1], *[None] * (_SINKS - _ROW_SPLITS - 1), sinks_of(node)]
        if lowering.rows == 1:
            inputs[_ROW_SPLITS] = None  # the one row has all tokens
        attributes = {name: attribute.value for name, attribute in node.attributes.items() if name != "later"}
        attributes["epsilon"] = 0.0
        swap(node, lowering, inputs, attributes, kind=(CPU_DOMAIN, node.op_type))


class WindowInside(Rule):
    """onnxruntime-cpu: attention under a WindowBias reads the bias after it, and takes each query's last keys itself.

    Keys before a query's window then cost nothing, and layers with and without a window share one bias.
    """

    def pattern(self, node: ir.Node) -> bool:
        return (node.domain, node.op_type) == (CPU_DOMAIN, "BranchAttention") and _window_bias(node) is not None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        windowed = _window_bias(node)
        assert windowed is not None
        inputs, attributes = list(node.inputs), {name: each.value for name, each in node.attributes.items()}
        inputs[_BIAS] = windowed.inputs[0]
        swap(node, lowering, inputs, attributes | {"window": windowed.attributes.get_int("window")})


def _window_bias(attention: ir.Node) -> ir.Node | None:
    """Return the WindowBias that makes the bias of `attention`, if one does."""
    bias = attention.inputs[_BIAS]
    made = None if bias is None else bias.producer()
    return made if made is not None and (made.domain, made.op_type) == (DOMAIN, "WindowBias") else None
