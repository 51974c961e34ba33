"""Ops around attention that its node does itself: the split of q, k and v, their norms, and their rotation.

`INSIDE` says which input of which op takes what; the rules know no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from outrider.compiler.graph_edits import attributes_of
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.plugins.schema import CPU_DOMAIN

_Q, _K, _V, _K_CACHE = 0, 1, 2, 3


def _any_rotation(node: ir.Node, cos: ir.Value) -> str | None:
    return None


def _reason_against_rotation(node: ir.Node, cos: ir.Value) -> str | None:
    """Why `GroupQueryAttention` cannot rotate by the table `cos` `[positions, head_dim / 2]`; None where it can."""
    cache = node.inputs[_K_CACHE]
    if cache is None or cache.shape is None or cos.shape is None:
        return "the sizes of its KV cache or of its table of angles are unknown"
    (*_, slots, head_dim), positions = cache.shape, cos.shape[0]
    if not isinstance(head_dim, int) or head_dim % 16:
        return f"its kernel rotates heads of a multiple of 16 numbers, and these have {head_dim}"
    if not isinstance(slots, int) or not isinstance(positions, int) or positions < slots:
        return f"it wants angles for every slot's position, {slots}, and the table has {positions}"
    return None


@dataclass(frozen=True)
class Inside:
    """The inputs of an attention op for what it can do itself, by index; q, k, v and the KV cache come first.

    `rotating` are the attributes of a node that rotates, `against_rotation` returns why a node cannot. A node that
    `rotates_parts` rotates the first numbers of a head, those that its table has cosines and sines for.
    """

    positions: int
    cos: int
    sin: int
    q_norm: int
    k_norm: int
    epsilon: str
    rotating: Mapping[str, int] = field(default_factory=dict)
    rotates_parts: bool = False
    against_rotation: Callable[[ir.Node, ir.Value], str | None] = _any_rotation


INSIDE: dict[tuple[str, str], Inside] = {
    (CPU_DOMAIN, "BranchAttention"): Inside(8, 9, 10, 11, 12, "epsilon", rotates_parts=True),
    (CONTRIBUTED, "GroupQueryAttention"): Inside(
        9, 7, 8, 14, 15, "qk_norm_epsilon", {"do_rotary": 1}, against_rotation=_reason_against_rotation
    ),
}


class RotateInside(Rule):
    """Rotations of queries and keys by the same angles, right before the attention, move into its node."""

    def pattern(self, node: ir.Node) -> bool:
        return _kind(node) in INSIDE

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        query, key = (_producer(node, index, "RotaryEmbedding") for index in (_Q, _K))
        if query is None or key is None:
            return "queries or keys are not rotated right before it"
        if len(query.inputs) < 4 or query.inputs[3] is None:
            return "the rotation has no positions"
        if list(query.inputs[1:]) != list(key.inputs[1:]):
            return "queries and keys are rotated by other angles"
        if any(rotation.attributes.get_int("interleaved", 0) for rotation in (query, key)):
            return "the rotation is interleaved"
        if _rotated(query) != _rotated(key):
            return "other parts of queries and of keys are rotated"
        cos = query.inputs[1]
        assert cos is not None
        inside = INSIDE[_kind(node)]
        if _rotated(query) and not inside.rotates_parts:
            return "it rotates whole heads, and of these a part is rotated"
        return inside.against_rotation(node, cos)

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        query, key = (_producer(node, index, "RotaryEmbedding") for index in (_Q, _K))
        assert query is not None
        assert key is not None
        inside = INSIDE[_kind(node)]
        inputs = _inputs(node, inside.positions, inside.cos, inside.sin)
        inputs[_Q], inputs[_K] = query.inputs[0], key.inputs[0]
        inputs[inside.cos], inputs[inside.sin], inputs[inside.positions] = query.inputs[1:4]
        swap(node, lowering, inputs, {**attributes_of(node), **inside.rotating})


class NormInside(Rule):
    """Norms of each head's query and key, right before the attention's own rotation, move into its node."""

    def pattern(self, node: ir.Node) -> bool:
        return _kind(node) in INSIDE

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        query, key = _head_norm(node, _Q), _head_norm(node, _K)
        if INSIDE[_kind(node)].rotating.items() - attributes_of(node).items():
            return "it norms what it rotates, and this one rotates nothing"
        if query is None or key is None:
            return "queries or keys have no norm of each head right before it"
        if _epsilon(query) != _epsilon(key):
            return "queries and keys are normed with other epsilons"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        inside, epsilon = INSIDE[_kind(node)], 0.0
        inputs = _inputs(node, inside.q_norm, inside.k_norm)
        for index, weight in ((_Q, inside.q_norm), (_K, inside.k_norm)):
            norm = _head_norm(node, index)
            assert norm is not None
            flat = norm.inputs[0]
            heads = None if flat is None else flat.producer()
            assert heads is not None
            inputs[index], inputs[weight] = heads.inputs[0], norm.inputs[1]
            epsilon = _epsilon(norm)
        swap(node, lowering, inputs, attributes_of(node) | {inside.epsilon: epsilon})


class PackedInside(Rule):
    """The Split of queries, keys and values goes: attention reads all three from the packed product."""

    def pattern(self, node: ir.Node) -> bool:
        return _kind(node) in INSIDE

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
        swap(node, lowering, [split.inputs[0], None, None, *node.inputs[3:]], attributes_of(node))


def swap(
    node: ir.Node,
    lowering: Lowering,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    kind: tuple[str, str] | None = None,
) -> None:
    """Replace `node` by attention of a `kind`, its own by default, with other `inputs` and `attributes`, and remove
    nodes whose outputs nothing reads any more.
    """
    old, (domain, op_type) = list(node.inputs), kind or _kind(node)
    lowering.put(node, ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(node.outputs)))
    for value in old:
        _remove_unread(value, lowering.graph)


def _kind(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type


def _inputs(node: ir.Node, *indices: int) -> list[ir.Value | None]:
    """Return the inputs of `node`, with room for those at `indices`."""
    return [*node.inputs, *[None] * (1 + max(indices) - len(node.inputs))]


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


def _rotated(rotation: ir.Node) -> int:
    """Return how many numbers of a head a RotaryEmbedding rotates, 0 for all."""
    return rotation.attributes.get_int("rotary_embedding_dim", 0)


def _epsilon(norm: ir.Node) -> float:
    return norm.attributes.get_float("epsilon", 1e-5)
