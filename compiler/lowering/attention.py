"""What BranchAttention becomes on an execution target."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compiler.lowering.rule import Lowering, Rule, replace
from plugins.onnx_ops import DOMAIN


class GroupQueryAttention(Rule):
    """onnxruntime-cpu, one row: `com.microsoft.GroupQueryAttention`, in place, cost by live keys.

    The op computes a single query with other arithmetic than several. In an exact engine one zero row behind the last
    token keeps it on the path for several, so that a token comes out bit for bit the same alone, in a
    chain or in a prefill chunk. The row's garbage key lands behind the tail, in the arena's headroom.
    Causality inside the op is harmless: the bias is at least as strict, since ancestors come first.
    Rotation stays outside at first (`rotation.RotateInside`).
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.domain == DOMAIN and node.op_type == "BranchAttention"

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        if lowering.rows != 1:
            return "GroupQueryAttention takes one row when tokens are several and a past exists"
        dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
        if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, None):
            return f"GroupQueryAttention on the CPU has no {dtype} kernel"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph = lowering.graph
        q, k, v, k_cache, v_cache = node.inputs[:5]
        bias, total, lengths = _view(node, lowering)
        tokens = [q, k, v]
        if lowering.exact:
            pads = lowering.constant("dummy_row.pads", ir.tensor(np.array([0, 0, 0, 0, 1, 0], np.int64)))
            padded = [ir.node("Pad", [x, pads]) for x in tokens]
            graph.insert_before(node, padded)
            tokens = [p.outputs[0] for p in padded]
        attributes = node.attributes
        attention = ir.node(
            "GroupQueryAttention",
            [*tokens, k_cache, v_cache, lengths, total, None, None, None, bias],
            {
                "num_heads": attributes.get_int("num_heads"),
                "kv_num_heads": attributes.get_int("kv_num_heads"),
                "scale": attributes.get_float("scale"),
                "do_rotary": 0,
            },
            domain="com.microsoft",
            num_outputs=3,
        )
        graph.insert_before(node, [attention])
        out = attention.outputs[0]
        if lowering.exact:
            zero, last, one = (
                lowering.constant(f"dummy_row.{name}", ir.tensor(np.array([value], np.int64)))
                for name, value in (("first", 0), ("last", -1), ("axis", 1))
            )
            kept = ir.node("Slice", [out, zero, last, one])
            graph.insert_before(node, [kept])
            out = kept.outputs[0]
        replace(graph, node, [out, attention.outputs[1], attention.outputs[2]])


class OneDummyRowPerLayer(Rule):
    """Where q, k and v come from one Split, the dummy row is added once, before it, instead of three times.

    It then passes through the norms and the rotation (with position 0), which change a row by itself alone.
    """

    def pattern(self, node: ir.Node) -> bool:
        return node.op_type == "GroupQueryAttention" and all(
            x is not None and (p := x.producer()) is not None and p.op_type == "Pad" for x in node.inputs[:3]
        )

    def check(self, node: ir.Node, lowering: Lowering) -> str | None:
        sources = {_split_behind(pad) for pad in _pads(node)}
        if len(sources) != 1 or None in sources:
            return "q, k and v do not come from one Split by way of norms and rotations"
        return None

    def rewrite(self, node: ir.Node, lowering: Lowering) -> None:
        graph = lowering.graph
        split = _split_behind(_pads(node)[0])
        assert split is not None
        pads = lowering.shared["dummy_row.pads"]
        padded = ir.node("Pad", [split.inputs[0], pads])
        graph.insert_before(split, [padded])
        split.replace_input_with(0, padded.outputs[0])
        for index, pad in enumerate(_pads(node)):
            for step in _path(pad):
                if step.op_type == "RotaryEmbedding":
                    step.replace_input_with(3, _padded_positions(step, lowering))
            node.replace_input_with(index, pad.inputs[0])
            graph.remove(pad, safe=True)


def _view(node: ir.Node, lowering: Lowering) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The bias of a pass, its key count, and the index of the pass's last key; made once for all its layers.

    In an exact engine the dummy row is counted: the bias gets its query and its key, and one key more, for
    `rotation.RotateInside`. GroupQueryAttention wants
    `total_sequence_length` equal to the bias's last dimension, while `seqlens_k` (the last key's index) may be
    smaller: so the view may be padded up to a bucket.
    """
    bias, past = node.inputs[5], node.inputs[6]
    assert bias is not None
    assert past is not None
    key = f"view.{bias.name}.{past.name}."
    if key + "bias" in lowering.shared:
        return lowering.shared[key + "bias"], lowering.shared[key + "total"], lowering.shared[key + "lengths"]
    scalar = lowering.constant("view.scalar", ir.tensor(np.array([], np.int64)))
    new = ir.node("Shape", [bias], {"start": 2, "end": 3})
    made = [new]
    seen = bias
    if lowering.exact:
        pads = lowering.constant("dummy_row.bias_pads", ir.tensor(np.array([0, 0, 0, 0, 0, 0, 1, 2], np.int64)))
        padded = ir.node("Pad", [bias, pads])
        end = ir.node("Add", [past, new.outputs[0]])
        seen = padded.outputs[0]
        made += [padded, end]
    else:
        one = lowering.constant("view.one", ir.tensor(np.array([1], np.int64)))
        before = ir.node("Sub", [new.outputs[0], one])
        end = ir.node("Add", [past, before.outputs[0]])
        made += [before, end]
    lengths = ir.node("Cast", [end.outputs[0]], {"to": ir.DataType.INT32})
    total = ir.node("Shape", [seen], {"start": 3, "end": 4})
    total_32 = ir.node("Cast", [total.outputs[0]], {"to": ir.DataType.INT32})
    total_scalar = ir.node("Reshape", [total_32.outputs[0], scalar])
    lowering.graph.insert_before(node, [*made, lengths, total, total_32, total_scalar])
    for name, value in (("bias", seen), ("total", total_scalar.outputs[0]), ("lengths", lengths.outputs[0])):
        lowering.shared[key + name] = value
    return seen, total_scalar.outputs[0], lengths.outputs[0]


_ROW_BY_ROW = {"Reshape", "RMSNormalization", "RotaryEmbedding", "Add"}


def _pads(attention: ir.Node) -> list[ir.Node]:
    """The Pads that give q, k and v their dummy row."""
    return [pad for x in attention.inputs[:3] if x is not None and (pad := x.producer()) is not None]


def _path(pad: ir.Node) -> list[ir.Node]:
    """The nodes that made what `pad` pads, backwards, up to the first that does not treat each row by itself."""
    nodes: list[ir.Node] = []
    value = pad.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        nodes.append(node)
        sum_of_two = node.op_type == "Add" and (node.inputs[1] is None or node.inputs[1].const_value is None)
        if node.op_type not in _ROW_BY_ROW or sum_of_two:  # the sum of two activations has rows of both
            break
        value = node.inputs[0]
    return nodes


def _split_behind(pad: ir.Node) -> ir.Node | None:
    nodes = _path(pad)
    return nodes[-1] if nodes and nodes[-1].op_type == "Split" else None


def _padded_positions(rotary: ir.Node, lowering: Lowering) -> ir.Value:
    """The positions with one for the dummy row; made once."""
    if "dummy_row.positions" not in lowering.shared:
        positions = rotary.inputs[3]
        assert positions is not None
        pads = lowering.constant("dummy_row.position_pads", ir.tensor(np.array([0, 0, 0, 1], np.int64)))
        padded = ir.node("Pad", [positions, pads])
        producer = positions.producer()
        assert producer is not None
        lowering.graph.insert_after(producer, [padded])
        lowering.shared["dummy_row.positions"] = padded.outputs[0]
    return lowering.shared["dummy_row.positions"]
