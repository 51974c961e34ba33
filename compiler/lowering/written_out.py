"""Attention as products, a softmax and what is around it, where no op for attention does the same."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.lowering.builder import Builder

_SINKS = 8  # the input of BranchAttention


def softcap_of(node: ir.Node) -> float:
    """Return the cap of a BranchAttention's scores, 0 where they have none."""
    return node.attributes.get_float("softcap", 0.0)


def sinks_of(node: ir.Node) -> ir.Value | None:
    """Return the sinks of a BranchAttention's heads, None where it has none."""
    return node.inputs[_SINKS] if len(node.inputs) > _SINKS else None


def is_plain(node: ir.Node) -> bool:
    """Return whether scores are not capped and heads have no sinks: what standard Attention is trusted with.

    It has no sinks, and implementations differ in whether its cap comes before its mask.
    """
    return softcap_of(node) == 0 and sinks_of(node) is None


def write_out(queries: ir.Value, keys: ir.Value, values: ir.Value, node: ir.Node, build: Builder) -> ir.Value:
    """Emit the attention of the BranchAttention `node` with `queries` `[1, heads, S, head_dim]` over keys and values
    `[1, kv_heads, T, head_dim]`, its softmax in float32 under the node's own bias.
    """
    q, k_cache, bias = node.inputs[0], node.inputs[3], node.inputs[5]
    assert q is not None
    assert k_cache is not None
    assert k_cache.shape is not None
    assert bias is not None
    heads, (_, kv_heads, _, head_dim) = node.attributes.get_int("num_heads"), k_cache.shape
    assert isinstance(kv_heads, int)
    assert isinstance(head_dim, int)
    group = heads // kv_heads
    split = build.numbers(f"groups.{kv_heads}.{group}.{head_dim}", 1, kv_heads, group, -1, head_dim)
    by_group = build.emit("Reshape", [queries, split])
    middle = build.numbers("group_axis", 2)
    keys, values = (build.emit("Unsqueeze", [x, middle]) for x in (keys, values))
    scale = build.real("scale", node.attributes.get_float("scale"))
    narrow = q.dtype if q.dtype != ir.DataType.FLOAT else None
    if narrow is not None:
        scale = build.emit("Cast", [scale], {"to": narrow})
    scaled = build.emit("Mul", [by_group, scale])
    scores = build.emit("MatMul", [scaled, build.emit("Transpose", [keys], {"perm": [0, 1, 2, 4, 3]})])
    if narrow is not None:
        scores = build.emit("Cast", [scores], {"to": ir.DataType.FLOAT})
    if softcap_of(node) != 0:
        cap = build.real("softcap", softcap_of(node))
        scores = build.emit("Mul", [build.emit("Tanh", [build.emit("Div", [scores, cap])]), cap])
    seen = build.emit("Add", [scores, build.emit("Unsqueeze", [bias, middle])])
    sinks = sinks_of(node)
    weights = build.emit("Softmax", [seen]) if sinks is None else _beside(sinks, seen, kv_heads, group, build)
    if narrow is not None:
        weights = build.emit("Cast", [weights], {"to": narrow})
    return build.emit("Reshape", [build.emit("MatMul", [weights, values]), build.emit("Shape", [queries])])


def _beside(sinks: ir.Value, seen: ir.Value, kv_heads: int, group: int, build: Builder) -> ir.Value:
    """Return the softmax of scores `[1, kv_heads, group, S, T]`, each head's beside its sink's exp in the sum."""
    sink = build.emit("Reshape", [sinks, build.numbers(f"sinks.{kv_heads}.{group}", 1, kv_heads, group, 1, 1)])
    sink = build.emit("Cast", [sink], {"to": ir.DataType.FLOAT})
    last = build.numbers("last", -1)
    highest = build.emit("Max", [build.emit("ReduceMax", [seen, last], {"keepdims": 1}), sink])
    raised = build.emit("Exp", [build.emit("Sub", [seen, highest])])
    total = build.emit("ReduceSum", [raised, last], {"keepdims": 1})
    total = build.emit("Add", [total, build.emit("Exp", [build.emit("Sub", [sink, highest])])])
    return build.emit("Div", [raised, total])
