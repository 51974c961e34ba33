"""BlockSummary: the largest and smallest key of each block of tokens."""

from __future__ import annotations

from outrider.plans import names
from outrider.plugins.cuda.launches import THREADS, make_launch
from outrider.plugins.ops import kv_blocks
from outrider.plugins.ops.kv_blocks import candidate_blocks
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.reference.kv_slots import from_slots
from outrider.plugins.schema import KV, OpSchema, one

SCHEMA = OpSchema(
    name="BlockSummary",
    version=4,
    doc="""The largest and smallest key of each block of tokens, element by element, of all heads of the layers that see
    every token: those with layer_windows 0. Summaries of the others stay as they are.

    Of the covered[0] tokens of row row[0] of a KV cache, the first sink_blocks * block_size are the sink. The window is
    the last window_blocks whole blocks and what has begun after them: it starts on the grid of blocks, no token
    falling between. Blocks between the two, counted from the sink's end, are candidates: block b is of the tokens from
    (sink_blocks + b) * block_size on. Those from summarised[0] on are summarised, the others stay as they are. Planes
    of kv are K and V of each layer in turn; of an int8 cache (`plans.kv_slots`), keys are integers times their scale,
    rounded to float32.
    Errors: ValueError for numbers out of range and more candidates than there is room for, before anything is written.
    Source: arXiv 2512.02337.""",
    inputs=(
        KV,
        kv_blocks.LAYER_WINDOWS,
        one(names.ROW),
        one(names.COVERED),
        one(names.SUMMARISED),
        kv_blocks.KEY_MAX,
        kv_blocks.KEY_MIN,
    ),
    outputs=(kv_blocks.KEY_MAX, kv_blocks.KEY_MIN),
    attributes=kv_blocks.LAYOUT,
)

_SHARES = 16  # CUDA blocks per head for new KV blocks: few are new in a step, many at once after a long prompt

OP = Op(
    SCHEMA,
    kv_blocks.BETWEEN_ENGINES,
    make_launch(
        SCHEMA,
        kernel="outrider_block_summary",
        numbers=(
            names.ROWS, "layers", "heads", "capacity", "head_dim", "blocks", "element", *kv_blocks.LAYOUT_NAMES,
        ),
        blocks=lambda s: s["layers"] * s["heads"] * min(s["blocks"], _SHARES),
        threads=lambda s: min(THREADS, max(32, s["head_dim"])),
    ),
)  # fmt: skip


def block_summary(tensors: Tensors, *, block_size: int, sink_blocks: int, window_blocks: int) -> None:
    """Summarise the keys of a row's blocks from block `summarised` on, in place, of layers without a window, by the
    tensors of BlockSummary."""
    (row,), (covered,), (first_block,) = tensors[names.ROW], tensors[names.COVERED], tensors[names.SUMMARISED]
    seeing_all = tensors[names.LAYER_WINDOWS] == 0
    for block in range(first_block, candidate_blocks(covered, block_size, sink_blocks, window_blocks)):
        first = (sink_blocks + block) * block_size
        keys = from_slots(tensors[names.KV][::2, row, :, first : first + block_size])[seeing_all]
        tensors[names.KEY_MAX][row, seeing_all, ..., block] = keys.max(axis=2)
        tensors[names.KEY_MIN][row, seeing_all, ..., block] = keys.min(axis=2)
