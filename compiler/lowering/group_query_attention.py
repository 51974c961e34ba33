"""BranchAttention as ONNX Runtime's own op for grouped heads, which appends in place and copies no keys."""

from __future__ import annotations

import onnx_ir as ir

from outrider.compiler.graph_edits import given
from outrider.compiler.lowering.attention import packed
from outrider.compiler.lowering.builder import Builder, around, rotated_part, sinks_of, softcap_of
from outrider.compiler.lowering.rule import CONTRIBUTED, Lowering, Rule
from outrider.plugins.onnx_ops import DOMAIN

KERNELS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types that the CUDA provider has kernels for."""
_VECTOR, _LARGEST = 8, 256  # numbers of a head: its kernels read as many at once, and keep a head in shared memory
_END = 2**63 - 1


class GroupQueryAttention(Rule):
    """onnxruntime-cuda, one row: `com.microsoft.GroupQueryAttention`, for any number of passes over one KV cache.

    Under a bias, standard `Attention` runs kernels for which ONNX Runtime repeats keys and values for every query head,
    after a copy of those in view. This op reads the KV cache where it lies. Its bias has a column for each of
    `total_sequence_length` keys, which the op reads on the host: here that is the size of the bias, so that it is fixed
    in a recording, and `seqlens_k`, on the device, says where the new tokens end. The op also hides later slots from
    earlier ones, which the bias hides already: a parent comes before its children. It norms heads that it rotates; what
    it does not rotate is done before it.

    It caps scores before it adds the bias: on CUDA in `unfused_attention.cu`, whose kernel alone takes a bias, and on
    the CPU, as the tests find. Sinks are declined, because that kernel takes no `head_sink`.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        q, cache = node.inputs[0], node.inputs[3]
        if lowering.rows != 1:
            return "several rows: GroupQueryAttention takes several tokens after earlier ones in one row alone"
        if node.attributes.get_int("later", 0):
            return "tokens see later ones of their pass, which GroupQueryAttention hides"
        if q is None or q.dtype not in KERNELS:
            return "the CUDA provider has no GroupQueryAttention in float32"
        if cache is None or cache.shape is None or not isinstance(head_dim := cache.shape[-1], int):
            return "the size of its heads is unknown"
        if sinks_of(node) is not None:
            return "its heads have sinks, which no kernel on CUDA takes together with a bias"
        if head_dim % _VECTOR or head_dim > _LARGEST:
            return f"its kernels take heads of a multiple of {_VECTOR} numbers up to {_LARGEST}; these have {head_dim}"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        (q, k, past), own, build = given((*node.inputs[:2], node.inputs[6])), node.attributes, Builder(lowering)
        _, positions, cos, sin, *norms = around(node)
        inside = cos is not None and rotates(node, cos)
        if not inside:
            q, k = build.queries_and_keys(node)
            positions, cos, sin, norms = None, None, None, [None, None]
        bias = build.windowed(node)
        seen, view = build.view(bias, q.dtype)
        inputs = [*packed([q, k, node.inputs[2]]), *node.inputs[3:5], _last_slot(bias, past, build)]
        inputs += [_total(bias, view, build), cos, sin, positions, seen]
        inputs += [] if norms[0] is None else [None, None, None, *norms]
        attributes = {
            "do_rotary": int(inside),
            "qk_norm_epsilon": own.get_float("epsilon", 0.0),
            "num_heads": own.get_int("num_heads"),
            "kv_num_heads": own.get_int("kv_num_heads"),
            "scale": own.get_float("scale"),
            "softcap": softcap_of(node),
        }
        build.put(node, ir.node("GroupQueryAttention", inputs, attributes, domain=CONTRIBUTED, num_outputs=3))


def rotates(node: ir.Node, cos: ir.Value) -> bool:
    """Return whether the kernel can rotate by the table `cos`: whole heads of a multiple of 16 numbers, with angles for
    every slot's position."""
    cache = node.inputs[3]
    if cache is None or cache.shape is None or cos.shape is None:
        return False
    (*_, slots, head_dim), (positions, _) = cache.shape, cos.shape
    if not isinstance(slots, int) or not isinstance(head_dim, int) or not isinstance(positions, int):
        return False
    return rotated_part(node) == 0 and head_dim % 16 == 0 and positions >= slots


def _last_slot(bias: ir.Value, past: ir.Value, build: Builder) -> ir.Value:
    """Return the slot of the last new token, int32 `[1]`: after `past` int64 `[1]`, with S tokens under the bias.

    Sizes are numbers on the host, and ONNX Runtime would add there too, and read `past` there. Range counts on the
    device.
    """
    shared, key = build.lowering.shared, f"attention.{bias.name}.last_slot"
    if key not in shared:
        size = build.emit("Shape", [bias], {"start": 2, "end": 3})
        count = build.emit("Squeeze", [size, build.numbers("first", 0)])
        indices = build.emit("Range", [build.number("none", 0), count, build.number("step", 1)])
        last = build.emit("Slice", [indices, build.numbers("last", -1), build.numbers("end", _END)])
        shared[key] = build.emit("Cast", [build.emit("Add", [past, last])], {"to": ir.DataType.INT32})
    return shared[key]


def _total(bias: ir.Value, view: ir.Value, build: Builder) -> ir.Value:
    """Return the number of keys in view, `[1]`, as the int32 that the op reads on the host."""
    shared, key = build.lowering.shared, f"attention.{bias.name}.total"
    if key not in shared:
        shared[key] = build.emit("Cast", [view], {"to": ir.DataType.INT32})
    return shared[key]
