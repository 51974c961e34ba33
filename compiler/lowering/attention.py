"""BranchAttention on the CPU: our own kernel in ONNX Runtime, and the ops that are fused into it.

The kernel (`plugins/csrc/onnxruntime`) reads visible keys only, so that a token's result is bit for bit the same
whatever else the pass computes: alone, in a chain, in a prefill chunk, as a node of a tree, in any row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from compiler.graph_edits import replace
from compiler.lowering.rule import Lowering, Rule
from plugins.onnx_ops import DOMAIN
from plugins.schema import CPU_DOMAIN

_Q, _K, _V = 0, 1, 2
_POSITIONS, _COS, _SIN, _Q_NORM, _K_NORM, _INPUTS = 8, 9, 10, 11, 12, 13


class CpuAttention(Rule):
    """onnxruntime-cpu: one node appends in place and attends, for any number of ragged rows.

    The node reads only whether a bias is 0: a key is visible or not, as BimMask and draft graphs write it.

    `com.microsoft.GroupQueryAttention` is slower for one or two tokens, computes one token differently from several,
    and takes only one row where several tokens follow earlier ones.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inputs = list(node.inputs)
        if lowering.rows == 1:
            inputs[-1] = None  # the one row has all tokens
        attributes = {name: attribute.value for name, attribute in node.attributes.items()} | {"epsilon": 0.0}
        _swap(node, lowering, [*inputs, *[None] * (_INPUTS - len(inputs))], attributes)


class RotateInside(Rule):
    """Rotations of queries and keys by the same angles, right before the attention, move into its node."""

    def pattern(self, node: ir.Node) -> bool:
        return _is_attention(node)

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        query, key = (_producer(node, index, "RotaryEmbedding") for index in (_Q, _K))
        if query is None or key is None:
            return "queries or keys are not rotated right before it"
        if len(query.inputs) < 4 or query.inputs[3] is None:
            return "the rotation has no positions"
        if list(query.inputs[1:]) != list(key.inputs[1:]):
            return "queries and keys are rotated by other angles"
        if any(
            r.attributes.get_int("interleaved", 0) or r.attributes.get_int("rotary_embedding_dim", 0)
            for r in (query, key)
        ):
            return "the rotation is interleaved, or of a part of each head"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        query, key = (_producer(node, index, "RotaryEmbedding") for index in (_Q, _K))
        assert query is not None
        assert key is not None
        inputs = list(node.inputs)
        inputs[_Q], inputs[_K] = query.inputs[0], key.inputs[0]
        inputs[_COS], inputs[_SIN], inputs[_POSITIONS] = query.inputs[1:4]
        _swap(node, lowering, inputs)


class NormInside(Rule):
    """Norms of each head's query and key, right before the attention's own rotation, move into its node."""

    def pattern(self, node: ir.Node) -> bool:
        return _is_attention(node)

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        query, key = _head_norm(node, _Q), _head_norm(node, _K)
        if query is None or key is None:
            return "queries or keys have no norm of each head right before it"
        if _epsilon(query) != _epsilon(key):
            return "queries and keys are normed with other epsilons"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inputs = list(node.inputs)
        epsilon = 0.0
        for index, weight in ((_Q, _Q_NORM), (_K, _K_NORM)):
            norm = _head_norm(node, index)
            assert norm is not None
            flat = norm.inputs[0]
            heads = None if flat is None else flat.producer()
            assert heads is not None
            inputs[index], inputs[weight] = heads.inputs[0], norm.inputs[1]
            epsilon = _epsilon(norm)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        _swap(node, lowering, inputs, attributes | {"epsilon": epsilon})


class PackedInside(Rule):
    """The Split of queries, keys and values goes: attention reads all three from the packed product."""

    def pattern(self, node: ir.Node) -> bool:
        return _is_attention(node)

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        splits = [_producer(node, index, "Split") for index in (_Q, _K, _V)]
        split = splits[0]
        if split is None or any(other is not split for other in splits):
            return "q, k and v do not come from one Split"
        if list(node.inputs[:3]) != list(split.outputs):
            return "the Split has q, k and v in another order, or more beside them"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        split = _producer(node, _Q, "Split")
        assert split is not None
        _swap(node, lowering, [split.inputs[0], None, None, *node.inputs[3:]])


def _is_attention(node: ir.Node) -> bool:
    return node.domain == CPU_DOMAIN and node.op_type == "BranchAttention"


def _swap(
    node: ir.Node, lowering: Lowering, inputs: list[ir.Value | None], attributes: Mapping[str, Any] | None = None
) -> None:
    """Replace `node` by attention with other `inputs`, and remove nodes whose outputs nothing reads any more."""
    old = list(node.inputs)
    own = {name: attribute.value for name, attribute in node.attributes.items()}
    made = ir.node("BranchAttention", inputs, attributes or own, domain=CPU_DOMAIN, num_outputs=len(node.outputs))
    lowering.graph.insert_before(node, [made])
    replace(lowering.graph, node, list(made.outputs))
    lowering.model.opset_imports.setdefault(CPU_DOMAIN, 1)
    for value in old:
        _remove_unread(value, lowering.graph)


def _remove_unread(value: ir.Value | None, graph: ir.Graph) -> None:
    node = None if value is None else value.producer()
    if node is None or node.graph is None or any(out.uses() or out in graph.outputs for out in node.outputs):
        return
    inputs = list(node.inputs)
    graph.remove(node, safe=True)
    for each in inputs:
        _remove_unread(each, graph)


def _producer(node: ir.Node, index: int, op_type: str) -> ir.Node | None:
    value = node.inputs[index]
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == op_type else None


def _head_norm(node: ir.Node, index: int) -> ir.Node | None:
    """Return the norm over the last dimension of `[1, N, heads, head_dim]`, between two Reshapes; else None."""
    flat = _producer(node, index, "Reshape")
    norm = None if flat is None else _producer(flat, 0, "RMSNormalization")
    if norm is None or norm.attributes.get_int("axis", -1) != -1 or _producer(norm, 0, "Reshape") is None:
        return None
    cache, weight = node.inputs[3], norm.inputs[1]
    if cache is None or cache.shape is None or weight is None or weight.shape is None:
        return None
    return norm if tuple(weight.shape) == (cache.shape[-1],) else None


def _epsilon(norm: ir.Node) -> float:
    return norm.attributes.get_float("epsilon", 1e-5)
