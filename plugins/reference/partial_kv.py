"""The three ops of partial KV: summarise blocks, select blocks, and gather them into a partial KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.kv_slots import from_slots

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def candidate_blocks(covered: int, block_size: int, sink_blocks: int, window_blocks: int) -> int:
    """Return the number of blocks between sink and window of `covered` tokens; the window begins at a block."""
    return max(0, covered // block_size - sink_blocks - window_blocks)


def blocks_in_reach(window: int, block_size: int, window_blocks: int) -> int:
    """Return how many blocks in front of `window_blocks` whole ones the last `window` tokens may lie in, the one after
    them all included."""
    return max(0, -(-(window - 1 - window_blocks * block_size) // block_size))


def block_summary(
    kv: NDArray[Any],
    layer_windows: Ints,
    row: int,
    covered: int,
    summarised: int,
    key_max: Floats,
    key_min: Floats,
    *,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
) -> None:
    """Summarise the keys of a row's blocks from block `summarised` on, in place, of layers without a window."""
    seeing_all = layer_windows == 0
    for block in range(summarised, candidate_blocks(covered, block_size, sink_blocks, window_blocks)):
        first = (sink_blocks + block) * block_size
        keys = from_slots(kv[::2, row, :, first : first + block_size])[seeing_all]
        key_max[row, seeing_all, ..., block] = keys.max(axis=2)
        key_min[row, seeing_all, ..., block] = keys.min(axis=2)


def block_select(
    queries: Floats,
    kept_indices: Ints,
    key_max: Floats,
    key_min: Floats,
    layer_windows: Ints,
    row: int,
    covered: int,
    budget: int,
    retrieval: int,
    *,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
    reduction: int,
    most_queries: int,
) -> Ints:
    """Select blocks `[layers, KV heads, retrieval]`, ascending, then -1, for `queries` `[layers, N, width]`."""
    key_max, key_min = key_max[row], key_min[row]
    layers, heads, head_dim, _ = key_max.shape
    candidates = candidate_blocks(covered, block_size, sink_blocks, window_blocks)
    count = min(budget, candidates)
    chosen = np.full((layers, heads, retrieval), -1, np.int64)
    asked = kept_indices[-1:] if reduction == 2 else kept_indices[-most_queries:]
    for layer in range(layers):
        if window := int(layer_windows[layer]):
            recent = min(count, blocks_in_reach(window, block_size, window_blocks))
            chosen[layer, :, :count] = [*range(count - recent), *range(candidates - recent, candidates)]
            continue
        for head in range(heads):
            mine = queries[layer, asked].reshape(len(asked), heads, -1, head_dim)[:, head].reshape(-1, head_dim)
            scores = np.stack([_score(q, key_max[layer, head], key_min[layer, head])[:candidates] for q in mine])
            total = scores[0].copy()
            for other in scores[1:]:
                with np.errstate(invalid="ignore", over="ignore"):
                    total = np.maximum(total, other) if reduction == 0 else total + other
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


def partial_kv_gather(
    kv: NDArray[Any],
    row: int,
    covered: int,
    selected: Ints,
    partial_kv: NDArray[Any],
    *,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
) -> int:
    """Copy a row's sink, selected blocks and window to the front of the row in `partial_kv`; return the slot count."""
    sink = sink_blocks * block_size
    window = sink + block_size * candidate_blocks(covered, block_size, sink_blocks, window_blocks)
    count = int((selected[0, 0] >= 0).sum())
    filled = sink + count * block_size + covered - window
    for layer, head in np.ndindex(selected.shape[:2]):
        retrieved = [
            sink + block * block_size + t for block in selected[layer, head, :count] for t in range(block_size)
        ]
        tokens = np.array([*range(sink), *retrieved, *range(window, covered)], np.int64)
        planes = slice(2 * layer, 2 * layer + 2)
        partial_kv[planes, row, head, :filled] = kv[planes, row, head, tokens]
    return filled
