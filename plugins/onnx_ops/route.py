"""Route in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import parser

from outrider.plugins.onnx_ops.domain import DOMAIN

_ROUTE = """
    last_1 = Constant <value_ints: ints = [-1]> ()
    top_k_1 = Constant <value_ints: ints = [1]> ()
    zero = Constant <value_float: float = 0.0> ()
    one = Constant <value_int: int = 1> ()
    top_k = Constant <value_int: int = @top_k> ()
    wanted = Constant <value_int: int = @normalise> ()
    normalise = Equal (wanted, one)
    count = Reshape (top_k, top_k_1)
    best, chosen = TopK <axis: int = -1> (logits, count)
    highest = ReduceMax <keepdims: int = 1> (best, last_1)
    best_above = Sub (best, highest)
    best_shares = Exp (best_above)
    above = Sub (logits, highest)
    shares = Exp (above)
    total_of_best = ReduceSum <keepdims: int = 1> (best_shares, last_1)
    total_of_all = ReduceSum <keepdims: int = 1> (shares, last_1)
    total = Where (normalise, total_of_best, total_of_all)
    best_weights = Div (best_shares, total)
    nothing = Mul (shares, zero)
    weights = ScatterElements <axis: int = -1> (nothing, chosen, best_weights)
"""


@cache
def route_function(*, biased: bool) -> onnx.FunctionProto:
    """Return the function body of Route, or of BiasedRoute. TopK puts the lower index first among equals."""
    name, inputs = ("BiasedRoute", "x, router, bias") if biased else ("Route", "x, router")
    product = "product = MatMul (x, router)\n"
    if biased:
        product += "biased = Add (product, bias)\nlogits = Cast <to: int = 1> (biased)"
    else:
        product += "logits = Cast <to: int = 1> (product)"
    return parser.parse_function(
        f'<opset_import: ["" : 24], domain: "{DOMAIN}"> {name} <top_k, normalise> ({inputs}) => (weights) '
        f"{{{product}\n{_ROUTE}}}"
    )
