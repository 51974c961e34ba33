"""PartialKvGather: fill the partial KV cache from the full one."""

from __future__ import annotations

import numpy as np

from outrider.plans import names
from outrider.plugins.cuda.launches import ROW_THREADS, make_launch
from outrider.plugins.ops import kv_blocks
from outrider.plugins.ops.kv_blocks import candidate_blocks
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.schema import ANY_KV, INTEGER, KV, SLOT, OpSchema, TensorSpec, one

_RESIDENT = TensorSpec(names.RESIDENT, INTEGER, (names.ROWS, *kv_blocks.RETRIEVED))
_PARTIAL_KV = TensorSpec("partial_kv", ANY_KV, ("planes", names.ROWS, "heads", "partial_capacity", SLOT))

SCHEMA = OpSchema(
    name="PartialKvGather",
    version=2,
    doc="""Fill the front of a row of the partial KV cache from that of the full one: sink, chosen blocks, window.

    Sink, window and blocks are those of BlockSummary, of covered[0] tokens of row row[0]; `selected` is as BlockSelect
    leaves it, the same number of blocks for every layer and head. `resident` says which block lies in each place of the
    row's retrieval already (-1: none): it is not copied again, and follows.
    Errors: ValueError for counts and blocks out of range, and too little room, before anything is moved.
    Source: arXiv 2512.02337.""",
    inputs=(
        KV,
        one(names.ROW),
        one(names.COVERED),
        kv_blocks.SELECTED,
        _PARTIAL_KV,
        _RESIDENT,
    ),
    outputs=(_PARTIAL_KV, _RESIDENT),
    attributes=kv_blocks.LAYOUT,
)

OP = Op(
    SCHEMA,
    kv_blocks.BETWEEN_ENGINES,
    make_launch(
        SCHEMA,
        kernel="outrider_partial_kv_gather",
        numbers=(
            names.ROWS, "layers", "heads", "capacity", "partial_capacity", "retrieval", *kv_blocks.LAYOUT_NAMES,
            "units", "unit",
        ),
        blocks=lambda s: s["layers"] * s["heads"],
        threads=lambda s: ROW_THREADS,
    ),
)  # fmt: skip


def partial_kv_gather(tensors: Tensors, *, block_size: int, sink_blocks: int, window_blocks: int) -> int:
    """Copy a row's sink, selected blocks and window to the front of the row in `partial_kv`, by the tensors of
    PartialKvGather; return the number of slots."""
    (row,), (covered,), selected = tensors[names.ROW], tensors[names.COVERED], tensors[names.SELECTED]
    sink = sink_blocks * block_size
    window = sink + block_size * candidate_blocks(covered, block_size, sink_blocks, window_blocks)
    count = int((selected[0, 0] >= 0).sum())
    filled = sink + count * block_size + covered - window
    for layer, head in np.ndindex(selected.shape[:2]):
        retrieved = [
            sink + block * block_size + t for block in selected[layer, head, :count] for t in range(block_size)
        ]
        kept = np.array([*range(sink), *retrieved, *range(window, covered)], np.int64)
        planes = slice(2 * layer, 2 * layer + 2)
        tensors[_PARTIAL_KV.name][planes, row, head, :filled] = tensors[names.KV][planes, row, head, kept]
    return int(filled)
