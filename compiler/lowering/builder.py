"""Attention in standard ops: nodes that stand for one attention node, and values that all layers of a pass share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from outrider.compiler.graph_edits import given, replace
from outrider.compiler.lowering.rule import Lowering
from outrider.plugins.onnx_ops import DOMAIN

SWAP = {"perm": [0, 2, 1, 3]}  # tokens and heads change places
LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -3.38e38}
"""Lowest bias of types with less range than float32 (float16), or coarser steps (bfloat16)."""
_AROUND = 6  # the inputs of BranchAttention that may be left out


class Builder:
    """The nodes that replace one node, in order; constants and values that all layers of a pass share are made once."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.nodes = lowering, list[ir.Node]()
        self.compared: tuple[ir.Value, ir.Value] | None = None

    def emit(
        self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any] | None = None, domain: str = ""
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes, domain=domain)
        self.nodes.append(node)
        return node.outputs[0]

    def numbers(self, name: str, *values: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(values, np.int64)))

    def number(self, name: str, value: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(value, np.int64)))

    def real(self, name: str, value: float) -> ir.Value:
        return self.lowering.constant(f"attention.{name}.{value!r}", ir.tensor(np.array(value, np.float32)))

    def split_heads(self, x: ir.Value, heads: int) -> ir.Value:
        """Reshape `[1, S, heads * head_dim]` to `[1, heads, S, head_dim]`."""
        split = self.emit("Reshape", [x, self.numbers(f"heads.{heads}", 0, 0, heads, -1)])
        return self.emit("Transpose", [split], SWAP)

    def queries_and_keys(self, node: ir.Node) -> tuple[ir.Value, ir.Value]:
        """Emit the norms and the rotation of a BranchAttention, once; return the queries and keys after them."""
        if self.compared is not None:
            return self.compared
        q, k, own = *given(node.inputs[:2]), node.attributes
        _, positions, cos, sin, q_norm, k_norm = around(node)

        def ready(x: ir.Value, heads: int, norm: ir.Value | None) -> ir.Value:
            kind = x.type
            if norm is not None:
                split = self.emit("Reshape", [x, self.numbers(f"heads.{heads}", 0, 0, heads, -1)])
                epsilon = own.get_float("epsilon")
                normed = self.emit("RMSNormalization", [split, norm], {"axis": -1, "epsilon": epsilon})
                x = self.emit("Reshape", [normed, self.numbers("flat", 0, 0, -1)])
            if cos is not None and sin is not None and positions is not None:
                part = {"num_heads": heads, "rotary_embedding_dim": rotated_part(node)}
                x = self.emit("RotaryEmbedding", [x, cos, sin, positions], part)
            x.type = kind
            return x

        keys = ready(k, own.get_int("kv_num_heads"), k_norm)
        self.compared = keys if q is k else ready(q, own.get_int("num_heads"), q_norm), keys
        return self.compared

    def windowed(self, node: ir.Node) -> ir.Value:
        """Return the bias of a BranchAttention under its window, which all layers of a pass share."""
        (bias,), window = given(node.inputs[5:6]), node.attributes.get_int("window", 0)
        name, shared = f"{bias.name}.window.{window}", self.lowering.shared
        if window and name not in shared:
            shared[name] = self.emit("WindowBias", [bias], {"window": window}, DOMAIN)
            shared[name].name, shared[name].type = name, bias.type
        return shared[name] if window else bias

    def put(self, node: ir.Node, new: ir.Node) -> None:
        """Put what was emitted, and `new`, in the place of a BranchAttention."""
        outputs = list(new.outputs)
        self.nodes.append(new)
        if is_asked_for_queries(node):
            queries, _ = self.queries_and_keys(node)
            outputs.append(self.emit("Squeeze", [queries, self.numbers("first", 0)]))
        node.resize_outputs(len(outputs))
        self.lowering.graph.insert_before(node, self.nodes)
        replace(self.lowering.graph, node, outputs)
        self.lowering.model.opset_imports.setdefault(new.domain, 1)

    def first_slots(self, cache: ir.Value, view: ir.Value) -> ir.Value:
        return self.emit("Slice", [cache, self.numbers("first", 0), view, self.numbers("slot_axis", 2)])

    def view(self, bias: ir.Value, wanted: ir.DataType | None) -> tuple[ir.Value, ir.Value]:
        """Return a pass's bias in the model's type, and its number of keys `[1]`."""
        shared, key = self.lowering.shared, f"attention.{bias.name}."
        if key + "view" not in shared:
            shared[key + "view"] = self.emit("Shape", [bias], {"start": 3, "end": 4})
        if wanted not in LOWEST:
            return bias, shared[key + "view"]
        typed = f"{key}{wanted.name}"
        if typed not in shared:
            lowest = ir.tensor(np.array(LOWEST[wanted], np.float32))
            bounded = self.emit("Max", [bias, self.lowering.constant("attention.lowest", lowest)])
            shared[typed] = self.emit("Cast", [bounded], {"to": wanted})
        return shared[typed], shared[key + "view"]


def softcap_of(node: ir.Node) -> float:
    """Return the cap of a BranchAttention's scores, 0 where they have none."""
    return node.attributes.get_float("softcap", 0.0)


def around(node: ir.Node) -> list[ir.Value | None]:
    """Return the sinks, positions, cosines, sines, and norms of queries and keys of a BranchAttention."""
    return [*node.inputs[8:], *[None] * _AROUND][:_AROUND]


def sinks_of(node: ir.Node) -> ir.Value | None:
    """Return the sinks of a BranchAttention's heads, None where it has none."""
    return around(node)[0]


def is_asked_for_queries(node: ir.Node) -> bool:
    """Return whether somebody reads the queries that a BranchAttention compares with keys."""
    return any(each.uses() or each.is_graph_output() for each in node.outputs[3:])


def rotated_part(node: ir.Node) -> int:
    """Return how many numbers of a head a BranchAttention rotates, 0 for all."""
    cos, k_cache = given((around(node)[2], node.inputs[3]))
    assert cos.shape is not None
    assert k_cache.shape is not None
    half = cos.shape[1]
    assert isinstance(half, int)
    return 0 if 2 * half == k_cache.shape[3] else 2 * half


def is_plain(node: ir.Node) -> bool:
    """Return whether scores are not capped and heads have no sinks: what standard Attention is trusted with.

    It has no sinks, and implementations differ in whether its cap comes before its mask.
    """
    return softcap_of(node) == 0 and sinks_of(node) is None


def write_out(queries: ir.Value, keys: ir.Value, values: ir.Value, node: ir.Node, build: Builder) -> ir.Value:
    """Emit the attention of the BranchAttention `node` with `queries` `[1, heads, S, head_dim]` over keys and values
    `[1, kv_heads, T, head_dim]`, its softmax in float32 under the node's own bias.
    """
    q, k_cache, bias = given((node.inputs[0], node.inputs[3], node.inputs[5]))
    assert k_cache.shape is not None
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
