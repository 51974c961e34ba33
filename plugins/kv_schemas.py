"""Schemas of the ops that move slots of a KV cache, or choose which slots to move; `schemas.py` has the other ops'."""

from __future__ import annotations

from outrider.plans import names
from outrider.plugins.schema import (
    ANY_KV,
    CAPACITY,
    INTEGER,
    ROW_SPLITS,
    SLOT,
    AttributeSpec,
    OpSchema,
    Reduction,
    TensorSpec,
    one,
    per_new_token,
    per_row,
)

_KV = TensorSpec(names.KV, ANY_KV, ("planes", names.ROWS, "heads", CAPACITY, SLOT))

KV_GATHER = OpSchema(
    name="KvGather",
    version=1,
    doc="""Compact slots of a KV cache in place.

    source[:source_count] are new tokens of the step; row_splits says, as in BimMask, which row owns which.
    For i = 0 .. source_count-1, one after another, with r the row of source[i], in every plane and head of that row:
    slot source_base[r] + (source[i] - row_splits[r]) -> slot destination[r] + (entries before i that r owns).
    Tokens that ascend within a row and slots that do not lie below their destinations arrive whole. Slots that stay
    where they are cost nothing. A step may have fewer rows than the cache: its first ones.
    Errors: ValueError for splits, tokens after the last split, and slots outside the cache, before any move.""",
    inputs=(
        _KV,
        per_new_token("source"),
        one("source_count"),
        ROW_SPLITS,
        per_row("source_base"),
        per_row("destination"),
    ),
    outputs=(_KV,),
    extents=(names.ROWS,),
)

_SUMMARY = (names.ROWS, "layers", "heads", "head_dim", "blocks")
_RETRIEVED = ("layers", "heads", "retrieval")
_KEY_MAX = TensorSpec(names.KEY_MAX, "float32", _SUMMARY)
_KEY_MIN = TensorSpec(names.KEY_MIN, "float32", _SUMMARY)
_LAYER_WINDOWS = TensorSpec(names.LAYER_WINDOWS, INTEGER, ("layers",))
_PARTIAL_LAYOUT = (
    AttributeSpec("block_size", int),
    AttributeSpec("sink_blocks", int),
    AttributeSpec("window_blocks", int),
)

BLOCK_SUMMARY = OpSchema(
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
        _KV,
        _LAYER_WINDOWS,
        one(names.ROW),
        one(names.COVERED),
        one(names.SUMMARISED),
        _KEY_MAX,
        _KEY_MIN,
    ),
    outputs=(_KEY_MAX, _KEY_MIN),
    attributes=_PARTIAL_LAYOUT,
)

BLOCK_SELECT = OpSchema(
    name="BlockSelect",
    version=3,
    doc="""The blocks that matter most to the last accepted tokens, of each layer and key head.

    That is of layers with layer_windows 0. A query of another layer l sees layer_windows[l] keys, itself the last one.
    Of such a layer the last candidates that its queries may see are selected: they and the window lie in one piece.
    The other places hold the first candidates, which no query sees: they stay the same, so that PartialKvGather copies
    them once.

    Candidates are those of BlockSummary, in row row[0]. Of the tokens kept_indices[:kept_count] of the step the last
    most_queries are asked, by the queries of all query heads that share a key head: a query q scores a block by
    max(q . key_max, q . key_min), in float32, summed in the order of a head's elements. Scores of one block become one
    by reduction: 0 the largest, 1 the mean, 2 the mean over the last token's alone. A score that is no number
    counts as float32's lowest. The budget[0] best blocks are selected, of equals the lower one first, and listed
    ascending; -1 after them. Queries of a layer lie from its plane's start on, tokens one after another.
    Errors: ValueError for numbers out of range, and for a budget that does not reach a layer's window where there are
    more candidates, before anything is written.
    Source: arXiv 2512.02337 (equations 1 to 3).""",
    inputs=(
        TensorSpec(names.QUERIES, "float32", ("layers", names.NEW, "num_heads * head_dim")),
        per_new_token(names.KEPT_INDICES),
        one(names.KEPT_COUNT),
        _KEY_MAX,
        _KEY_MIN,
        _LAYER_WINDOWS,
        one(names.ROW),
        one(names.COVERED),
        one(names.BUDGET),
    ),
    outputs=(TensorSpec(names.SELECTED, INTEGER, _RETRIEVED),),
    attributes=(
        *_PARTIAL_LAYOUT,
        AttributeSpec("reduction", int, int(Reduction.MAX)),
        AttributeSpec("most_queries", int, 8),
    ),
)

_RESIDENT = TensorSpec(names.RESIDENT, INTEGER, (names.ROWS, *_RETRIEVED))
_PARTIAL_KV = TensorSpec("partial_kv", ANY_KV, ("planes", names.ROWS, "heads", "partial_capacity", SLOT))

PARTIAL_KV_GATHER = OpSchema(
    name="PartialKvGather",
    version=2,
    doc="""Fill the front of a row of the partial KV cache from that of the full one: sink, chosen blocks, window.

    Sink, window and blocks are those of BlockSummary, of covered[0] tokens of row row[0]; `selected` is as BlockSelect
    leaves it, the same number of blocks for every layer and head. `resident` says which block lies in each place of the
    row's retrieval already (-1: none): it is not copied again, and follows.
    Errors: ValueError for counts and blocks out of range, and too little room, before anything is moved.
    Source: arXiv 2512.02337.""",
    inputs=(
        _KV,
        one(names.ROW),
        one(names.COVERED),
        TensorSpec(names.SELECTED, INTEGER, _RETRIEVED),
        _PARTIAL_KV,
        _RESIDENT,
    ),
    outputs=(_PARTIAL_KV, _RESIDENT),
    attributes=_PARTIAL_LAYOUT,
)
