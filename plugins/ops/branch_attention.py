"""BranchAttention: append each row's new keys and values, then attend over the row's keys under a bias."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.ops.op import Op, Tensors
from outrider.plugins.reference.kv_slots import from_slots, to_slots
from outrider.plugins.schema import (
    ANY_FLOAT,
    ATTN_BIAS,
    CAPACITY,
    INTEGER,
    ROW_SPLITS,
    AttributeSpec,
    OpSchema,
    TensorSpec,
    per_row,
)
from outrider.plugins.tensorrt.plugin import Declined

_CACHE = (names.ROWS, "kv_num_heads", CAPACITY, "head_dim")
_QUERY_WIDTH = "num_heads * head_dim"
_KEY_WIDTH = "kv_num_heads * head_dim"

SCHEMA = OpSchema(
    name="BranchAttention",
    version=3,
    doc="""Append each row's new keys and values, then attend over the row's T keys under a bias.

    Tokens of all rows lie one after another (row_splits); row r's are appended at past_length[r]. Token s of row r
    gives softmax(c(q . k * scale) + attn_bias[r, 0, s]) over the row's T keys, applied to v; query head h uses KV head
    h // (num_heads / kv_num_heads). c(x) is softcap * tanh(x / softcap), or x where `softcap` is 0; the bias is added
    to capped scores, so that hidden keys stay hidden. With `sinks`, which may be left out, the softmax of head h has
    exp(sinks[h]) in its sum as well: a key without a value, under no cap. Where `later` is 1, the bias may show a token
    of the step that comes after the query's, else none. Where `asks` is 0, nobody reads `out`: its numbers are any
    finite ones.
    Before that, where the inputs are there, each head of q and k is normed by its root mean square, with weights q_norm
    and k_norm, and its first numbers are rotated by halves, to positions; where `window` is not 0, the bias is that of
    WindowBias. queries are q as they are compared with keys.
    Stands in graphs only, and is lowered there: no CPU kernel.
    Source: the cap, Gemma 2 (arXiv 2408.00118); sinks, gpt-oss.""",
    inputs=(
        TensorSpec("q", ANY_FLOAT, (1, names.NEW, _QUERY_WIDTH)),
        TensorSpec("k", ANY_FLOAT, (1, names.NEW, _KEY_WIDTH)),
        TensorSpec("v", ANY_FLOAT, (1, names.NEW, _KEY_WIDTH)),
        TensorSpec("k_cache", ANY_FLOAT, _CACHE),
        TensorSpec("v_cache", ANY_FLOAT, _CACHE),
        ATTN_BIAS,
        per_row(names.PAST_LENGTH),
        ROW_SPLITS,
        TensorSpec("sinks", ANY_FLOAT, ("num_heads",), optional=True),
        TensorSpec(names.POSITIONS, INTEGER, (1, names.NEW), optional=True),
        TensorSpec("cos", ANY_FLOAT, ("positions", "rotated / 2"), optional=True),
        TensorSpec("sin", ANY_FLOAT, ("positions", "rotated / 2"), optional=True),
        TensorSpec("q_norm", ANY_FLOAT, ("head_dim",), optional=True),
        TensorSpec("k_norm", ANY_FLOAT, ("head_dim",), optional=True),
    ),
    outputs=(
        TensorSpec("out", ANY_FLOAT, (1, names.NEW, _QUERY_WIDTH)),
        TensorSpec(names.cache_output("k_cache"), ANY_FLOAT, _CACHE),
        TensorSpec(names.cache_output("v_cache"), ANY_FLOAT, _CACHE),
        TensorSpec("queries", ANY_FLOAT, (names.NEW, _QUERY_WIDTH), optional=True),
    ),
    attributes=(
        AttributeSpec("num_heads", int),
        AttributeSpec("kv_num_heads", int),
        AttributeSpec("scale", float),
        AttributeSpec("later", int, 0),
        AttributeSpec("asks", int, 1),
        AttributeSpec("softcap", float, 0.0),
        AttributeSpec("window", int, 0),
        AttributeSpec("epsilon", float, 0.0),
    ),
)

OP = Op(SCHEMA, Declined("it is lowered to TensorRT's own cache update and attention layers"))


Float = NDArray[Any]


def softmax(scores: NDArray[np.float64], sink: float = -np.inf) -> NDArray[np.float64]:
    """Return the weights of keys with `scores` beside a key with the score `sink`, which is of no key by default."""
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - top)
    return np.asarray(weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)))


def softcap_scores(scores: NDArray[np.float64], softcap: float) -> NDArray[np.float64]:
    return scores if softcap == 0 else softcap * np.tanh(scores / softcap)


def branch_attention(
    tensors: Tensors, *, num_heads: int, kv_num_heads: int, scale: float, softcap: float = 0.0
) -> tuple[Float, Float, Float]:
    """Return `(out, k_cache_out, v_cache_out)` by the inputs of BranchAttention that attending takes: all up to
    `row_splits`, and `sinks`. Sums are in float64.

    The leading 1 of `q`, `k`, `v` may be left out; `out` has the shape and dtype of `q`. Caches may be of any type that
    `kv_slots` knows: new keys and values are attended to as the caches keep them.
    """
    q, k, v, k_cache, v_cache = (tensors[name] for name in ("q", "k", "v", "k_cache", "v_cache"))
    attn_bias, row_splits, sinks = tensors[names.ATTN_BIAS], tensors[names.ROW_SPLITS], tensors.get("sinks")
    head_dim = q.shape[-1] // num_heads
    view = attn_bias.shape[-1]
    queries = q.reshape(-1, num_heads, head_dim)
    keys = k.reshape(-1, kv_num_heads, head_dim)
    values = v.reshape(-1, kv_num_heads, head_dim)
    k_cache_out, v_cache_out = k_cache.copy(), v_cache.copy()
    out = np.zeros(queries.shape, dtype=np.float64)

    for row, past in enumerate(tensors[names.PAST_LENGTH].tolist()):
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
