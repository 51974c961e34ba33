"""Attention of an engine on random rows, after a past that all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx_ir as ir
from onnx import parser

from outrider.compiler.graph_edits import attributes_of, given
from outrider.compiler.probes.ops import ProbePart, ProbeTape, as_rows, extent, leading, rows_input
from outrider.plans.buffers import DType
from outrider.plans.kv_slots import slot_size

PAST = 48
"""Slots that are filled before the rows come: more than a vector is wide, and no power of two."""

ROWS = 32
"""Most rows that there is room for after them."""

_WINDOW = PAST // 4
"""The widest window of a probed node: half of the past is visible, and of that a part must fall out of the window."""

_Q, _K, _V, _K_CACHE, _V_CACHE, _BIAS, _PAST_LENGTH, _ROW_SPLITS, _POSITIONS, _CONSTANTS = range(10)

# Rows stand beside each other at one position, as siblings of a tree do: each has its key and value in a slot of its
# own, which lies elsewhere in another company, and sees no other's.
_SIBLINGS = """
<opset_import: ["" : 24], domain: "outrider.probe">
Siblings (x, hidden_past) => (attn_bias, row_splits, positions)
{
    zero = Constant <value_ints: ints = [0]> ()
    one = Constant <value_ints: ints = [1]> ()
    leading = Constant <value_ints: ints = [0, 1]> ()
    past = Shape <start: int = 1, end: int = 2> (hidden_past)
    count = Shape <start: int = 1, end: int = 2> (x)
    square = Concat <axis: int = 0> (count, count)
    nothing = ConstantOfShape (square)
    itself = EyeLike (nothing)
    visible = Constant <value_float: float = 1.0> ()
    others = Sub (visible, itself)
    flat_bias = Concat <axis: int = 1> (hidden_past, others)
    attn_bias = Unsqueeze (flat_bias, leading)
    row_splits = Concat <axis: int = 0> (zero, count)
    one_row = Concat <axis: int = 0> (one, count)
    positions = Expand (past, one_row)
}
"""


@cache
def siblings_function() -> ir.Function:
    """Return the function that lays rows of attention out."""
    return ir.serde.deserialize_function(parser.parse_function(_SIBLINGS))


def add_attention(tape: ProbeTape, node: ir.Node, label: str) -> ProbePart:
    """Add `outrider.cpu.BranchAttention`, each row seeing itself and the part of the past that its own input names.

    A first node appends the past, so that the KV cache is of any type.
    """
    query, key = _widths(node)
    widths = [query + 2 * key] if node.inputs[_K] is None else [query, key, key]
    rows = [rows_input(f"{label}.{index}", width) for index, width in enumerate(widths)]
    past = [
        ir.Value(name=f"{label}.past.{index}", shape=ir.Shape([1, PAST, width]), type=rows[0].type)
        for index, width in enumerate(widths)
    ]
    choice = rows_input(f"{label}.choice", PAST, rank=2)
    # A slot of the past is visible where the choice is not positive, which it is about half the time.
    bias, splits, positions = tape.op_multi_out(
        siblings_function().name,
        [rows[0], tape.op("Relu", [choice])],
        num_outputs=3,
        domain=siblings_function().domain,
    )
    empty = {
        _BIAS: _constant(tape, "all_visible", np.zeros((1, 1, PAST, PAST), np.float32)),
        _PAST_LENGTH: _constant(tape, "no_past", np.zeros(1, np.int64)),
        _ROW_SPLITS: _constant(tape, "past_splits", np.array([0, PAST])),
        _POSITIONS: _constant(tape, "past_positions", np.arange(PAST)[None]),
    }
    filled = _attend(tape, node, past, _empty_caches(tape, node), empty)
    after = {
        _BIAS: bias,
        _PAST_LENGTH: _constant(tape, "past", np.array([PAST])),
        _ROW_SPLITS: splits,
        _POSITIONS: positions,
    }
    outputs = _attend(tape, node, rows, filled[1:3], after)
    probed = [as_rows(outputs[0], query), *(as_rows(queries, query, rank=2) for queries in outputs[3:])]
    return ProbePart([*rows, *past, choice], probed)


def _widths(node: ir.Node) -> tuple[int, int]:
    """Return the widths of the node's q, and of its k or v."""
    cache = given(node.inputs[_K_CACHE:_BIAS])[0]
    assert cache.dtype is not None
    size = extent(cache, 3) - slot_size(DType(cache.dtype.numpy().name), 0)
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    return heads * size, kv_heads * size


def _empty_caches(tape: ProbeTape, node: ir.Node) -> list[ir.Value]:
    value = given(node.inputs[_K_CACHE:_BIAS])[0]
    assert value.dtype is not None
    zero = ir.tensor(np.zeros(1, value.dtype.numpy()), dtype=value.dtype)
    extents = [1, extent(value, 1), PAST + ROWS, extent(value, 3)]
    shape = _constant(tape, f"cache.{'x'.join(map(str, extents))}", np.array(extents))
    return [tape.op("ConstantOfShape", [shape], {"value": zero}) for _ in range(2)]


def _attend(
    tape: ProbeTape,
    node: ir.Node,
    tokens: Sequence[ir.Value],
    caches: Sequence[ir.Value],
    layout: Mapping[int, ir.Value],
) -> Sequence[ir.Value]:
    """Add a node like `node` with other tokens and caches, in the given layout as far as `node` reads one."""
    inputs: list[ir.Value | None] = [*tokens, *[None] * (3 - len(tokens)), *caches]
    own = node.inputs[_BIAS:_CONSTANTS]
    inputs += [None if value is None else layout[index] for index, value in enumerate(own, _BIAS)]
    for value in node.inputs[_CONSTANTS:]:
        is_table = value is not None and value.shape is not None and len(value.shape) == 2  # of rotations
        inputs.append(leading(tape, value, [PAST + 1, extent(value, 1)] if is_table else None))
    attributes = attributes_of(node)
    if attributes.get("window", 0) > _WINDOW:
        attributes["window"] = _WINDOW
    return tape.op_multi_out(node.op_type, inputs, attributes, num_outputs=len(node.outputs), domain=node.domain)


def _constant(tape: ProbeTape, name: str, value: np.ndarray) -> ir.Value:
    return tape.initializer(ir.tensor(value), f"probe.{name}")
