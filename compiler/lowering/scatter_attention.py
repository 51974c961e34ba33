"""BranchAttention in standard ops, where they run in place: TensorScatter, and Attention over the keys in view."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import given, replace
from outrider.compiler.lowering.builder import SWAP, Builder, is_plain, write_out
from outrider.compiler.lowering.rule import Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN


class ScatterAttention(Rule):
    """One row: all tokens of the step are its own, so the op needs none of its body's ragged indexing.

    ONNX Runtime runs both ops in place on bound buffers, for any number of passes over one KV cache. The bias is cast
    to the model's type, which fused kernels need. Attention with capped scores or with sinks is written out.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        return None if lowering.rows == 1 else "several rows are ragged, which takes the op's whole body"

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        attributes = node.attributes
        q, k, v, k_cache, v_cache, bias, past = given(node.inputs[:7])
        build = Builder(lowering)
        seen, view = build.view(bias, q.dtype if is_plain(node) else None)
        heads, kv_heads = attributes.get_int("num_heads"), attributes.get_int("kv_num_heads")
        queries, keys, values = (build.split_heads(x, n) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
        k_present, keys_seen = self.append(k_cache, keys, past, view, build)
        v_present, values_seen = self.append(v_cache, values, past, view, build)
        attended = self.attend(queries, keys_seen, values_seen, seen, node, build)
        out = build.emit("Reshape", [build.emit("Transpose", [attended], SWAP), build.numbers("flat", 0, 0, -1)])
        lowering.graph.insert_before(node, build.nodes)
        replace(lowering.graph, node, [out, k_present, v_present])

    def append(
        self, cache: ir.Value, new: ir.Value, past: ir.Value, view: ir.Value, build: Builder
    ) -> tuple[ir.Value | None, ir.Value]:
        """Write `new` `[1, kv_heads, S, head_dim]` into `cache` at slot `past`; return the cache and its slots in view.

        The returned cache is None for a pass that leaves no KV in the KV cache.
        """
        present = build.emit("TensorScatter", [cache, new, past], {"axis": -2})
        return present, build.first_slots(present, view)

    def attend(
        self, queries: ir.Value, keys: ir.Value, values: ir.Value, bias: ir.Value, node: ir.Node, build: Builder
    ) -> ir.Value:
        """Attend with `queries` `[1, heads, S, head_dim]` over keys and values `[1, kv_heads, T, head_dim]`."""
        if not is_plain(node):
            return write_out(queries, keys, values, node, build)
        return build.emit("Attention", [queries, keys, values, bias], {"scale": node.attributes.get_float("scale")})


class UpdateOnceAttention(ScatterAttention):
    """TensorRT: TensorScatter is its KV cache update, which a graph may have once for each cache.

    Later passes over a KV cache, the levels of a draft, write keys and values into a copy of the slots in view, and
    their KV does not reach the KV cache. Attention in float32, for which TensorRT has no kernel, is written out.
    """

    def attend(
        self, queries: ir.Value, keys: ir.Value, values: ir.Value, bias: ir.Value, node: ir.Node, build: Builder
    ) -> ir.Value:
        if given(node.inputs[:1])[0].dtype == ir.DataType.FLOAT:
            return write_out(queries, keys, values, node, build)
        return super().attend(queries, keys, values, bias, node, build)

    def append(
        self, cache: ir.Value, new: ir.Value, past: ir.Value, view: ir.Value, build: Builder
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
