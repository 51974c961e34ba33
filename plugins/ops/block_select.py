"""BlockSelect: the blocks that matter most to the last accepted tokens."""

from __future__ import annotations

import numpy as np

from outrider.plans import names
from outrider.plugins.cuda.launches import ROW_THREADS, Scratch, make_launch
from outrider.plugins.ops import kv_blocks
from outrider.plugins.ops.kv_blocks import Floats, Ints, blocks_in_reach, candidate_blocks
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.schema import AttributeSpec, OpSchema, Reduction, TensorSpec, one, per_new_token

SCHEMA = OpSchema(
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
        kv_blocks.KEY_MAX,
        kv_blocks.KEY_MIN,
        kv_blocks.LAYER_WINDOWS,
        one(names.ROW),
        one(names.COVERED),
        one(names.BUDGET),
    ),
    outputs=(kv_blocks.SELECTED,),
    attributes=(
        *kv_blocks.LAYOUT,
        AttributeSpec("reduction", int, int(Reduction.MAX)),
        AttributeSpec("most_queries", int, 8),
    ),
)

OP = Op(
    SCHEMA,
    kv_blocks.BETWEEN_ENGINES,
    make_launch(
        SCHEMA,
        kernel="outrider_block_select",
        numbers=(
            names.ROWS, "layers", "heads", "head_dim", "blocks", "retrieval", names.NEW, "num_heads * head_dim",
            *kv_blocks.LAYOUT_NAMES, "reduction", "most_queries",
        ),
        blocks=lambda s: s["layers"] * s["heads"],
        threads=lambda s: ROW_THREADS,
        scratch={"scores": Scratch(lambda s: 4 * s["layers"] * s["heads"] * s["blocks"])},
    ),
)  # fmt: skip


def block_select(
    tensors: Tensors, *, block_size: int, sink_blocks: int, window_blocks: int, reduction: int, most_queries: int
) -> Ints:
    """Select blocks `[layers, KV heads, retrieval]`, ascending, then -1, by the tensors of BlockSelect."""
    (row,), (covered,), (budget,), (kept,) = (
        tensors[name] for name in (names.ROW, names.COVERED, names.BUDGET, names.KEPT_COUNT)
    )
    key_max, key_min = tensors[names.KEY_MAX][row], tensors[names.KEY_MIN][row]
    layers, heads, head_dim, _ = key_max.shape
    candidates = candidate_blocks(covered, block_size, sink_blocks, window_blocks)
    count = min(budget, candidates)
    chosen = np.full(tensors[names.SELECTED].shape, -1, np.int64)
    kept_indices = tensors[names.KEPT_INDICES][:kept]
    asked = kept_indices[-1:] if reduction == Reduction.LAST else kept_indices[-most_queries:]
    for layer in range(layers):
        if window := int(tensors[names.LAYER_WINDOWS][layer]):
            recent = min(count, blocks_in_reach(window, block_size, window_blocks))
            chosen[layer, :, :count] = [*range(count - recent), *range(candidates - recent, candidates)]
            continue
        for head in range(heads):
            queries = tensors[names.QUERIES][layer, asked].reshape(len(asked), heads, -1, head_dim)
            mine = queries[:, head].reshape(-1, head_dim)
            scores = np.stack([_score(q, key_max[layer, head], key_min[layer, head])[:candidates] for q in mine])
            total = scores[0].copy()
            for other in scores[1:]:
                with np.errstate(invalid="ignore", over="ignore"):
                    total = np.maximum(total, other) if reduction == Reduction.MAX else total + other
            best = np.argsort(-_worth(total), kind="stable")[:count]
            chosen[layer, head, :count] = np.sort(best)
    return chosen


def _score(query: Floats, key_max: Floats, key_min: Floats) -> Floats:
    """Score all blocks by one query: the larger of its products with both summaries `[head_dim, blocks]`."""
    with np.errstate(invalid="ignore", over="ignore"):
        high = low = np.zeros(key_max.shape[1], np.float32)
        for d, q in enumerate(query):
            high, low = high + q * key_max[d], low + q * key_min[d]
    return np.maximum(_worth(high), _worth(low))


def _worth(score: Floats) -> Floats:
    return np.where(np.isnan(score), np.finfo(np.float32).min, score).astype(np.float32)
