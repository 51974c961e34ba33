"""BranchAttention in standard ops, for any number of ragged rows.

Its body has the standard Attention, but where scores are capped or heads have sinks. Then attention is written out:
Attention has no sinks, and whether its cap comes before its mask, which hides nothing under a cap, was corrected in the
standard (onnx/onnx#7867) and in ONNX Runtime (microsoft/onnxruntime#28379) after both were published.
"""

from __future__ import annotations

from functools import cache

import onnx
from onnx import parser

# Rows are ragged in `q`, `k`, `v` and rectangular inside the body: `rect[r, s]` is the flat index of the token at place
# s of row r (clamped: places after a row's end repeat other tokens, whose KV lands after the row's last slot in the
# cache), and `flat[n]` is the place of flat token n in the rectangle.
_BRANCH_ATTENTION = """
<opset_import: ["" : 24], domain: "outrider">
BranchAttention <num_heads, kv_num_heads, scaleMORE_ATTRIBUTES>
    (q, k, v, k_cache, v_cache, attn_bias, past_length, row_splitsMORE_INPUTS) => (out, k_cache_out, v_cache_out)
{
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    zero_1 = Constant <value_ints: ints = [0]> ()
    one_1 = Constant <value_ints: ints = [1]> ()
    two_1 = Constant <value_ints: ints = [2]> ()
    minus_1 = Constant <value_ints: ints = [-1]> ()
    max_1 = Constant <value_ints: ints = [9223372036854775807]> ()
    zeros_2 = Constant <value_ints: ints = [0, 0]> ()
    heads = Constant <value_int: int = @num_heads> ()
    heads_1 = Unsqueeze (heads, zero_1)
    kv_heads = Constant <value_int: int = @kv_num_heads> ()
    kv_heads_1 = Unsqueeze (kv_heads, zero_1)
    q_split = Concat <axis: int = 0> (zeros_2, heads_1, minus_1)
    kv_split = Concat <axis: int = 0> (zeros_2, kv_heads_1, minus_1)

    new_1 = Shape <start: int = 1, end: int = 2> (q)
    new = Squeeze (new_1, zero_1)
    places_1 = Shape <start: int = 2, end: int = 3> (attn_bias)
    places = Squeeze (places_1, zero_1)
    view_1 = Shape <start: int = 3, end: int = 4> (attn_bias)
    starts = Slice (row_splits, zero_1, minus_1, zero_1)
    ends = Slice (row_splits, one_1, max_1, zero_1)

    place = Range (zero, places, one)
    place_row = Unsqueeze (place, zero_1)
    starts_column = Unsqueeze (starts, one_1)
    rect_raw = Add (starts_column, place_row)
    last = Sub (new, one)
    rect = Min (rect_raw, last)

    token = Range (zero, new, one)
    token_column = Unsqueeze (token, one_1)
    ends_row = Unsqueeze (ends, zero_1)
    passed = GreaterOrEqual (token_column, ends_row)
    passed_count = Cast <to: int = 7> (passed)
    row = ReduceSum <keepdims: int = 0> (passed_count, one_1)
    row_start = Gather (starts, row)
    row_place = Sub (token, row_start)
    row_base = Mul (row, places)
    flat = Add (row_base, row_place)

    q_flat = Squeeze (q, zero_1)
    k_flat = Squeeze (k, zero_1)
    v_flat = Squeeze (v, zero_1)
    q_rect = Gather (q_flat, rect)
    k_rect = Gather (k_flat, rect)
    v_rect = Gather (v_flat, rect)
    q_heads = Reshape (q_rect, q_split)
    k_heads = Reshape (k_rect, kv_split)
    v_heads = Reshape (v_rect, kv_split)
    q_4d = Transpose <perm: ints = [0, 2, 1, 3]> (q_heads)
    k_4d = Transpose <perm: ints = [0, 2, 1, 3]> (k_heads)
    v_4d = Transpose <perm: ints = [0, 2, 1, 3]> (v_heads)
    k_cache_out = TensorScatter <axis: int = -2> (k_cache, k_4d, past_length)
    v_cache_out = TensorScatter <axis: int = -2> (v_cache, v_4d, past_length)
    k_view = Slice (k_cache_out, zero_1, view_1, two_1)
    v_view = Slice (v_cache_out, zero_1, view_1, two_1)
    ATTENTION
    out_heads = Transpose <perm: ints = [0, 2, 1, 3]> (out_4d)
    q_width_1 = Shape <start: int = 2, end: int = 3> (q)
    out_shape = Concat <axis: int = 0> (minus_1, q_width_1)
    out_rect = Reshape (out_heads, out_shape)
    out_flat = Gather (out_rect, flat)
    out = Unsqueeze (out_flat, zero_1)
}
"""


_ATTENTION = """
    out_4d = Attention <scale: float = @scale> (q_4d, k_view, v_view, attn_bias)
"""

# Queries are grouped by the KV head that they share: `[R, kv_heads, group, S, head_dim]`. Scores are in float32.
_WRITTEN_OUT = """
    group_axis = Constant <value_ints: ints = [2]> ()
    group_1 = Div (heads_1, kv_heads_1)
    head_dim_1 = Shape <start: int = 3, end: int = 4> (q_4d)
    grouped = Concat <axis: int = 0> (zero_1, kv_heads_1, group_1, minus_1, head_dim_1)
    scale = Constant <value_float: float = @scale> ()
    q_grouped = Reshape (q_4d, grouped)
    scale_like = CastLike (scale, q_grouped)
    q_scaled = Mul (q_grouped, scale_like)
    k_grouped = Unsqueeze (k_view, group_axis)
    v_grouped = Unsqueeze (v_view, group_axis)
    k_across = Transpose <perm: ints = [0, 1, 2, 4, 3]> (k_grouped)
    scores_typed = MatMul (q_scaled, k_across)
    scores = Cast <to: int = 1> (scores_typed)
    CAPPED
    bias_typed = Unsqueeze (attn_bias, group_axis)
    bias = Cast <to: int = 1> (bias_typed)
    seen = Add (capped, bias)
    WEIGHTS
    weights_typed = CastLike (weights, v_grouped)
    out_grouped = MatMul (weights_typed, v_grouped)
    shape_4d = Shape (q_4d)
    out_4d = Reshape (out_grouped, shape_4d)
"""

_CAPPED = """
    cap = Constant <value_float: float = @softcap> ()
    of_cap = Div (scores, cap)
    saturated = Tanh (of_cap)
    capped = Mul (saturated, cap)
"""

_SOFTMAX = "weights = Softmax <axis: int = -1> (seen)"

_WITH_SINKS = """
    sinks_shape = Concat <axis: int = 0> (one_1, kv_heads_1, group_1, one_1, one_1)
    sinks_float = Cast <to: int = 1> (sinks)
    sink = Reshape (sinks_float, sinks_shape)
    highest_seen = ReduceMax <keepdims: int = 1> (seen, minus_1)
    highest = Max (highest_seen, sink)
    below = Sub (seen, highest)
    raised = Exp (below)
    sink_below = Sub (sink, highest)
    raised_sink = Exp (sink_below)
    sum_seen = ReduceSum <keepdims: int = 1> (raised, minus_1)
    sum = Add (sum_seen, raised_sink)
    weights = Div (raised, sum)
"""


@cache
def branch_attention_function(*, softcap: bool = False, sinks: bool = False) -> onnx.FunctionProto:
    """Return the function body of BranchAttention, for any number of rows.

    With `softcap` it is that of nodes whose softcap is not 0, with `sinks` that of nodes with sinks: overloads, named
    after what they have.
    """
    attention, overload = _ATTENTION, "_".join(["softcap"] * softcap + ["sinks"] * sinks)
    if overload:
        attention = _WRITTEN_OUT.replace("CAPPED", _CAPPED if softcap else "capped = Identity (scores)")
        attention = attention.replace("WEIGHTS", _WITH_SINKS if sinks else _SOFTMAX)
    body = _BRANCH_ATTENTION.replace("    ATTENTION", attention)
    body = body.replace("MORE_ATTRIBUTES", ", softcap" if softcap else "").replace(
        "MORE_INPUTS", ", sinks" if sinks else ""
    )
    function = parser.parse_function(body)
    function.overload = overload
    return function
