"""Rotation inside the attention op."""

from __future__ import annotations

import onnx_ir as ir

from compiler.lowering.rule import Lowering, Rule, replace

_Q, _K, _CACHE = 0, 1, 3
_COS, _SIN, _POSITIONS = 7, 8, 9


class RotateInside(Rule):
    """onnxruntime-cpu: GroupQueryAttention rotates queries and keys itself, by the same positions, to the same bits.

    Two nodes less a layer. Where it takes a step for a first prompt, as many tokens as keys, it reads the first
    position alone; an exact engine has a key more than it ever has tokens.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "GroupQueryAttention" and node.domain == "com.microsoft"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        cache = node.inputs[_CACHE]
        head_dim = None if cache is None or cache.shape is None else cache.shape[-1]
        if not isinstance(head_dim, int) or head_dim % 16:
            return f"it rotates heads of a multiple of 16, and these have {head_dim}"
        if not lowering.exact:
            return "tokens may be as many as keys, and positions would then count from the first"
        query, key = (_rotation(node, index) for index in (_Q, _K))
        if query is None or key is None:
            return "queries or keys are not rotated right before it"
        if any(a is not b for a, b in zip(query.inputs[1:], key.inputs[1:], strict=True)):
            return "queries and keys are rotated by other angles"
        if any(
            r.attributes.get_int("interleaved", 0) or r.attributes.get_int("rotary_embedding_dim", 0)
            for r in (query, key)
        ):
            return "the rotation is interleaved, or of a part of each head"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        query, key = _rotation(node, _Q), _rotation(node, _K)
        assert query is not None
        assert key is not None
        inputs = list(node.inputs)
        inputs[_Q], inputs[_K] = query.inputs[0], key.inputs[0]
        inputs[_COS], inputs[_SIN], inputs[_POSITIONS] = query.inputs[1:4]
        rotating = ir.node(
            node.op_type,
            inputs,
            {name: attribute.value for name, attribute in node.attributes.items()} | {"do_rotary": 1},
            domain=node.domain,
            num_outputs=len(node.outputs),
        )
        lowering.graph.insert_before(node, [rotating])
        replace(lowering.graph, node, list(rotating.outputs))
        for rotation in (query, key):
            if not rotation.outputs[0].uses():
                lowering.graph.remove(rotation, safe=True)


def _rotation(node: ir.Node, index: int) -> ir.Node | None:
    value = node.inputs[index]
    producer = None if value is None else value.producer()
    return producer if producer is not None and producer.op_type == "RotaryEmbedding" else None
