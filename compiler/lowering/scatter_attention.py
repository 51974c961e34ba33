"""BranchAttention in standard ops, where they run in place: TensorScatter, and Attention over the keys in view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from compiler.graph_edits import replace
from compiler.lowering.rule import Lowering, Rule
from plugins.onnx_ops import DOMAIN

_SWAP = {"perm": [0, 2, 1, 3]}  # tokens and heads change places
LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -3.38e38}
"""Lowest bias of types with less range than float32 (float16), or coarser steps (bfloat16)."""


class ScatterAttention(Rule):
    """One row: all tokens of the step are its own, so the op needs none of its body's ragged indexing.

    ONNX Runtime runs both ops in place on bound buffers, for any number of passes over one KV cache. The bias is cast
    to the model's type, which fused kernels need.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return None if lowering.rows == 1 else "several rows are ragged, which takes the op's whole body"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        attributes = node.attributes
        q, k, v, k_cache, v_cache, bias, past = node.inputs[:7]
        assert q is not None
        assert k is not None
        assert v is not None
        assert k_cache is not None
        assert v_cache is not None
        assert bias is not None
        assert past is not None
        build = _Builder(lowering)
        seen, view = build.view(bias, q.dtype)
        heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("kv_num_heads")
        queries, keys, values = (build.split_heads(x, n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        k_present, keys_seen = self.append(k_cache, keys, past, view, build)
        v_present, values_seen = self.append(v_cache, values, past, view, build)
        attended = self.attend(queries, keys_seen, values_seen, seen, node, build)
        out = build.emit("Reshape", [build.emit("Transpose", [attended], _SWAP), build.numbers("flat", 0, 0, -1)])
        lowering.graph.insert_before(node, build.nodes)
        replace(lowering.graph, node, [out, k_present, v_present])

    def append(
        self, cache: ir.Value, new: ir.Value, past: ir.Value, view: ir.Value, build: _Builder
    ) -> tuple[ir.Value | None, ir.Value]:
        """Write `new` `[1, kv_heads, S, head_dim]` into `cache` at slot `past`; return the cache and its slots in view.

        The returned cache is None for a pass that leaves no KV in the KV cache.
        """
        present = build.emit("TensorScatter", [cache, new, past], {"axis": -2})
        return present, build.first_slots(present, view)

    def attend(
        self, queries: ir.Value, keys: ir.Value, values: ir.Value, bias: ir.Value, node: ir.Node, build: _Builder
    ) -> ir.Value:
        """Attend with `queries` `[1, heads, S, head_dim]` over keys and values `[1, kv_heads, T, head_dim]`."""
        return build.emit("Attention", [queries, keys, values, bias], {"scale": node.attributes.get_float("scale")})


class UpdateOnceAttention(ScatterAttention):
    """TensorRT: TensorScatter is its KV cache update, which a graph may have once for each cache.

    Later passes over a KV cache, the levels of a draft, write keys and values into a copy of the slots in view, and
    their KV does not reach the KV cache. Attention in float32, for which TensorRT has no kernel, is written out.
    """

    def attend(
        self, queries: ir.Value, keys: ir.Value, values: ir.Value, bias: ir.Value, node: ir.Node, build: _Builder
    ) -> ir.Value:
        q, k_cache = node.inputs[0], node.inputs[3]
        assert q is not None
        assert k_cache is not None
        assert k_cache.shape is not None
        if q.dtype != ir.DataType.FLOAT:
            return super().attend(queries, keys, values, bias, node, build)
        heads, (_, kv_heads, _, head_dim) = node.attributes.get_int("num_heads"), k_cache.shape
        assert isinstance(kv_heads, int)
        assert isinstance(head_dim, int)
        split = build.numbers("groups", 1, kv_heads, heads // kv_heads, -1, head_dim)
        by_group = build.emit("Reshape", [queries, split])
        middle = build.numbers("group_axis", 2)
        keys, values = (build.emit("Unsqueeze", [x, middle]) for x in (keys, values))
        factor = build.lowering.constant(
            "attention.scale", ir.tensor(np.array(node.attributes.get_float("scale"), np.float32))
        )
        scaled = build.emit("Mul", [by_group, factor])
        scores = build.emit("MatMul", [scaled, build.emit("Transpose", [keys], {"perm": [0, 1, 2, 4, 3]})])
        weights = build.emit("Softmax", [build.emit("Add", [scores, build.emit("Unsqueeze", [bias, middle])])])
        return build.emit("Reshape", [build.emit("MatMul", [weights, values]), build.emit("Shape", [queries])])

    def append(
        self, cache: ir.Value, new: ir.Value, past: ir.Value, view: ir.Value, build: _Builder
    ) -> tuple[ir.Value | None, ir.Value]:
        shared, key = build.lowering.shared, f"attention.in_view.{cache.name}"
        if key not in shared:
            present, shared[key] = super().append(cache, new, past, view, build)
            return present, shared[key]
        count = build.emit("Squeeze", [build.emit("Shape", [new], {"start": 2, "end": 3}), build.numbers("first", 0)])
        ahead = build.emit("Range", [build.number("none", 0), count, build.number("step", 1)])
        slots = build.emit("Reshape", [build.emit("Add", [ahead, past]), build.numbers("slots", 1, 1, -1, 1)])
        index = build.emit("Expand", [slots, build.emit("Shape", [new])])
        shared[key] = build.emit("ScatterElements", [shared[key], index, new], {"axis": 2})
        return None, shared[key]


class _Builder:
    """The nodes that replace one node, in order; constants and values that all layers of a pass share are made once."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.nodes = lowering, list[ir.Node]()

    def emit(self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any] | None = None) -> ir.Value:
        node = ir.node(op, inputs, attributes)
        self.nodes.append(node)
        return node.outputs[0]

    def numbers(self, name: str, *values: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(values, np.int64)))

    def number(self, name: str, value: int) -> ir.Value:
        return self.lowering.constant(f"attention.{name}", ir.tensor(np.array(value, np.int64)))

    def split_heads(self, x: ir.Value, heads: int) -> ir.Value:
        """Reshape `[1, S, heads * head_dim]` to `[1, heads, S, head_dim]`."""
        split = self.emit("Reshape", [x, self.numbers(f"heads.{heads}", 0, 0, heads, -1)])
        return self.emit("Transpose", [split], _SWAP)

    def first_slots(self, cache: ir.Value, view: ir.Value) -> ir.Value:
        return self.emit("Slice", [cache, self.numbers("first", 0), view, self.numbers("slot_axis", 2)])

    def view(self, bias: ir.Value, wanted: ir.DataType | None) -> tuple[ir.Value, ir.Value]:
        """Return a pass's bias in the model's type, and its number of keys `[1]`."""
        shared, key = self.lowering.shared, f"attention.{bias.name}."
        if key + "view" not in shared:
            shared[key + "view"] = self.emit("Shape", [bias], {"start": 3, "end": 4})
            shared[key + "bias"] = bias
            if wanted in LOWEST:
                lowest = ir.tensor(np.array(LOWEST[wanted], np.float32))
                bounded = self.emit("Max", [bias, self.lowering.constant("attention.lowest", lowest)])
                shared[key + "bias"] = self.emit("Cast", [bounded], {"to": wanted})
        return shared[key + "bias"], shared[key + "view"]
