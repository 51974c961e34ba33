"""DraftSample in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION
from plugins.onnx_ops.filtered import FILTERED

# Sums are in float64, so that a token's chance in the draw equals its `probability` to the last bits.
_DRAFT_SAMPLE = """
<opset_import: ["" : 24], domain: "outrider">
DraftSample (logits, draws, temperature, top_k_filter, top_p) => (token, probability)
{
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    behind = Constant <value_ints: ints = [1, 2]> ()
    still = Constant <value: tensor = double[1] {0.0}> ()
    sampled = Greater (temperature, still)
    FILTERED
    none = Constant <value_int: int = -1> ()
    kept_exact = Cast <to: int = 11> (kept_weights)
    summed = CumSum (kept_exact, none)
    summed_total = ReduceMax (summed, last_1)
    draws_3 = Unsqueeze (draws, behind)
    goal = Mul (draws_3, summed_total)
    passed = LessOrEqual (summed, goal)
    passed_i = Cast <to: int = 7> (passed)
    chosen = ReduceSum (passed_i, last_1)
    size_1 = Shape <start: int = 2, end: int = 3> (logits)
    last_token = Sub (size_1, one_1)
    chosen_inside = Min (chosen, last_token)
    normed_exact = Div (kept_exact, summed_total)
    normed = Cast <to: int = 1> (normed_exact)
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
    """Return the function body of DraftSample."""
    return parser.parse_function(_DRAFT_SAMPLE.replace("FILTERED", FILTERED))


def draft_sample_schema() -> defs.OpSchema:
    """Return the op's schema for ONNX; `plugins.schemas` defines its meaning."""
    parameter = defs.OpSchema.FormalParameter
    return defs.OpSchema(
        "DraftSample",
        DOMAIN,
        VERSION,
        doc="A token drawn from a drafter's own distribution, and that distribution.",
        inputs=[
            parameter("logits", "F", "[B, F, V]"),
            parameter("draws", "D", "[B]"),
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
