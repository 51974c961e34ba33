"""DraftSample in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION
from plugins.onnx_ops.inverse_cdf import INVERSE_CDF

_DRAFT_SAMPLE = """
<opset_import: ["" : 24], domain: "outrider">
DraftSample (logits, draws, temperature, top_k_filter, top_p) => (token, probability)
{
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    behind = Constant <value_ints: ints = [1, 2]> ()
    nothing = Constant <value_float: float = 0.0> ()
    heat = Cast <to: int = 1> (temperature)
    sampled = Greater (heat, nothing)
    INVERSE_CDF
    normed = Div (kept_weights, summed_total)
    best = ArgMax <axis: int = 2> (logits)
    vocabulary = Squeeze (size_1)
    ids = Range (zero_i, vocabulary, one_i)
    is_best = Equal (ids, best)
    certain = Cast <to: int = 1> (is_best)
    probability = Where (sampled_3, normed, certain)
    token_nested = Where (sampled_3, chosen_inside, best)
    token = Squeeze (token_nested, last_1)
}
"""


@cache
def draft_sample_function() -> onnx.FunctionProto:
    """DraftSample in standard ops."""
    return parser.parse_function(_DRAFT_SAMPLE.replace("INVERSE_CDF", INVERSE_CDF))


def draft_sample_schema() -> defs.OpSchema:
    """What ONNX is told of the op; its meaning stands in `plugins.schemas`."""
    parameter = defs.OpSchema.FormalParameter
    return defs.OpSchema(
        "DraftSample",
        DOMAIN,
        VERSION,
        doc="A token drawn from a drafter's own distribution, and that distribution.",
        inputs=[
            parameter("logits", "F", "[B, F, V]"),
            parameter("draws", "F", "[B]"),
            parameter("temperature", "D", "[B], 0 is greedy"),
            parameter("top_k_filter", "I", "[B], 0 is off"),
            parameter("top_p", "D", "[B], 1 is off"),
        ],
        outputs=[
            parameter("token", "I", "[B, F]"),
            parameter("probability", "F", "[B, F, V], what the token was drawn from"),
        ],
        type_constraints=[
            ("F", ["tensor(float)"], "Probabilities are float32."),
            ("D", ["tensor(double)"], "Sampling settings, as the target has them."),
            ("I", ["tensor(int64)"], "Indices."),
        ],
    )
