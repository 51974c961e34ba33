"""DraftSample in standard ops."""

from __future__ import annotations

from outrider.plugins.onnx_ops.filtered import FILTERED, SETTINGS_OF

# Sums are in float64, so that `probability` has all digits of float32.
DRAFT_SAMPLE = """
<opset_import: ["" : 24], domain: "outrider">
DraftSample (logits, noise, draft_sampling) => (token, probability)
{
    last_1 = Constant <value_ints: ints = [-1]> ()
    SETTINGS_OF
    FILTERED
    kept_exact = Cast <to: int = 11> (kept_weights)
    kept_total = ReduceSum (kept_exact, last_1)
    normed_exact = Div (kept_exact, kept_total)
    normed = Cast <to: int = 1> (normed_exact)
    fastest = ArgMax <axis: int = 2> (pace)
    best = ArgMax <axis: int = 2> (logits)
    size_1 = Shape <start: int = 2, end: int = 3> (logits)
    vocabulary = Squeeze (size_1)
    zero_i = Constant <value_int: int = 0> ()
    one_i = Constant <value_int: int = 1> ()
    ids = Range (zero_i, vocabulary, one_i)
    is_best = Equal (ids, best)
    certain = Cast <to: int = 1> (is_best)
    probability = Where (sampled, normed, certain)
    token_nested = Where (sampled, fastest, best)
    token = Squeeze (token_nested, last_1)
}
""".replace("SETTINGS_OF", SETTINGS_OF).replace("FILTERED", FILTERED)
