"""BranchAttention in standard ops, for any number of ragged rows."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, helper, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION

# Rows are ragged in `q`, `k`, `v` and rectangular inside the body: `rect[r, s]` is the flat index of the token at place
# s of row r (clamped: places behind a row's end repeat other tokens, whose KV lands behind the row's last slot in the
# cache), and `flat[n]` is the place of flat token n in the rectangle.
_BRANCH_ATTENTION = """
<opset_import: ["" : 24], domain: "outrider">
BranchAttention <num_heads, kv_num_heads, scale>
    (q, k, v, k_cache, v_cache, attn_bias, past_length, row_splits) => (out, k_cache_out, v_cache_out)
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
    out_4d = Attention <scale: float = @scale> (q_4d, k_view, v_view, attn_bias)
    out_heads = Transpose <perm: ints = [0, 2, 1, 3]> (out_4d)
    q_width_1 = Shape <start: int = 2, end: int = 3> (q)
    out_shape = Concat <axis: int = 0> (minus_1, q_width_1)
    out_rect = Reshape (out_heads, out_shape)
    out_flat = Gather (out_rect, flat)
    out = Unsqueeze (out_flat, zero_1)
}
"""


@cache
def branch_attention_function() -> onnx.FunctionProto:
    """Return the function body of BranchAttention, for any number of rows."""
    return parser.parse_function(_BRANCH_ATTENTION)


def branch_attention_schema() -> defs.OpSchema:
    """Return the op's schema for ONNX; `plugins.schemas` defines its meaning."""
    parameter = defs.OpSchema.FormalParameter
    attribute = defs.OpSchema.Attribute
    kinds = defs.OpSchema.AttrType
    return defs.OpSchema(
        "BranchAttention",
        DOMAIN,
        VERSION,
        doc="Append each row's new keys and values, then attend over the row's T keys under a bias.",
        inputs=[
            parameter("q", "F", "[1, N, num_heads * head_dim], rotated; rows lie one after another"),
            parameter("k", "F", "[1, N, kv_num_heads * head_dim], rotated"),
            parameter("v", "F", "[1, N, kv_num_heads * head_dim]"),
            parameter("k_cache", "F", "[R, kv_num_heads, capacity, head_dim]"),
            parameter("v_cache", "F", "[R, kv_num_heads, capacity, head_dim]"),
            parameter("attn_bias", "B", "[R, 1, S, T], added to the scaled scores"),
            parameter("past_length", "I", "[R], where a row's new tokens are appended"),
            parameter("row_splits", "I", "[R + 1], which row owns which new tokens"),
        ],
        outputs=[
            parameter("out", "F", "[1, N, num_heads * head_dim]"),
            parameter("k_cache_out", "F", "k_cache with the new keys"),
            parameter("v_cache_out", "F", "v_cache with the new values"),
        ],
        type_constraints=[
            ("F", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "Model precision."),
            ("B", ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"], "Precision of the bias."),
            ("I", ["tensor(int64)"], "Indices."),
        ],
        attributes=[
            attribute("num_heads", kinds.INT, "query heads"),
            attribute("kv_num_heads", kinds.INT, "key/value heads; a divisor of num_heads"),
            attribute("scale", kinds.FLOAT, "factor of q.k"),
            defs.OpSchema.Attribute(
                "later", helper.make_attribute("later", 0), "1: the bias may show a token new ones that come after it"
            ),
            defs.OpSchema.Attribute("asks", helper.make_attribute("asks", 1), "0: nobody reads `out`"),
        ],
    )
