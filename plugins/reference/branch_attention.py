"""Append each row's new keys and values, then attend over the row's keys under a bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.kv_slots import from_slots, to_slots

Float = NDArray[Any]


def softmax(scores: NDArray[np.float64], sink: float = -np.inf) -> NDArray[np.float64]:
    """Return the weights of keys with `scores` beside a key with the score `sink`, which is of no key by default."""
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    return np.asarray(weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)))


def softcap_scores(scores: NDArray[np.float64], softcap: float) -> NDArray[np.float64]:
    return scores if softcap == 0 else softcap * np.tanh(scores / softcap)


def branch_attention(
    q: Float,
    k: Float,
    v: Float,
    k_cache: Float,
    v_cache: Float,
    attn_bias: NDArray[np.float32],
    past_length: NDArray[np.int64],
    row_splits: NDArray[np.int64],
    sinks: Float | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Float, Float, Float]:
    """Return `(out, k_cache_out, v_cache_out)`; shapes as in the schema of BranchAttention, sums in float64.

    The leading 1 of `q`, `k`, `v` may be left out; `out` has the shape and dtype of `q`. Caches may be of any type that
    `kv_slots` knows: new keys and values are attended to as the caches keep them.
    """
    head_dim = q.shape[-1] // num_heads
    view = attn_bias.shape[-1]
    queries = q.reshape(-1, num_heads, head_dim)
    keys = k.reshape(-1, kv_num_heads, head_dim)
    values = v.reshape(-1, kv_num_heads, head_dim)
    k_cache_out, v_cache_out = k_cache.copy(), v_cache.copy()
    out = np.zeros(queries.shape, dtype=np.float64)

    for row, past in enumerate(past_length.tolist()):
        first, end = row_splits[row : row + 2].tolist()
        appended = slice(past, past + end - first)
        k_cache_out[row, :, appended] = to_slots(keys[first:end].swapaxes(0, 1), k_cache.dtype)
        v_cache_out[row, :, appended] = to_slots(values[first:end].swapaxes(0, 1), v_cache.dtype)
        bias = attn_bias[row, 0, : end - first].astype(np.float64)
        for head in range(num_heads):
            kv_head = head // (num_heads // kv_num_heads)
            row_keys = from_slots(k_cache_out[row, kv_head, :view]).astype(np.float64)
            row_values = from_slots(v_cache_out[row, kv_head, :view]).astype(np.float64)
            scores = queries[first:end, head].astype(np.float64) @ row_keys.T * scale
            sink = -np.inf if sinks is None else float(sinks[head])
            out[first:end, head] = softmax(softcap_scores(scores, softcap) + bias, sink) @ row_values

    return out.reshape(q.shape).astype(q.dtype), k_cache_out, v_cache_out
