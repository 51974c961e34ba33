"""TreeExpand in standard ops."""

from __future__ import annotations

from outrider.plugins.onnx_ops.filtered import FILTERED, SETTINGS_OF

# The tree needs TopK's order: the lower index first among equals. Log-probabilities are computed for the chosen logits
# only: the vocabulary is read twice and never written. The nodes for the target's races are in an If, so that greedy
# drafting does not pay for them.
TREE_EXPAND = """
<opset_import: ["" : 24], domain: "outrider">
TreeExpand <top_k, doubt> (logits, score, noise, draft_sampling)
    => (token, candidate_score, frontier)
{
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    flat = Constant <value_ints: ints = [0, -1]> ()
    k = Constant <value_int: int = @top_k> ()
    k_1 = Reshape (k, one_1)
    doubt = Constant <value_float: float = @doubt> ()
    certain = Constant <value_float: float = 1.0> ()
    trust = Sub (certain, doubt)
    tiny = Constant <value_float: float = 1e-30> ()

    best, likely = TopK (logits, k_1)
    normaliser = ReduceLogSumExp (logits, last_1)
    log_prob = Sub (best, normaliser)

    SETTINGS_OF
    sampled_counted = Cast <to: int = 7> (sampled)
    sampled_any = ReduceMax <keepdims: int = 0> (sampled_counted)
    any_sampled = Cast <to: int = 9> (sampled_any)
    child, own = If (any_sampled) <
        then_branch = coupled () => (int64["B", "F", "K"] child_coupled, float["B", "F", "K"] own_coupled) {
            FILTERED
            paces = ReduceSum (pace, last_1)
            near_scale = Div (trust, paces)
            near = Mul (pace, near_scale)
            far_scale = Div (doubt, total)
            far = Mul (weights, far_scale)
            mass = Add (near, far)
            highest_mass, likely_here = TopK (mass, k_1)
            probability = Max (highest_mass, tiny)
            own_here = Log (probability)
            child_coupled = Where (sampled, likely_here, likely)
            own_coupled = Where (sampled, own_here, log_prob)
        },
        else_branch = greedy () => (int64["B", "F", "K"] child_greedy, float["B", "F", "K"] own_greedy) {
            child_greedy = Identity (likely)
            own_greedy = Identity (log_prob)
        }
    >
    parent_score = Unsqueeze (score, last_1)
    lowest_score = Constant <value_float: float = -3.0e38> ()
    unknown = IsNaN (own)
    own_known = Where (unknown, lowest_score, own)
    summed_score = Add (own_known, parent_score)
    candidate_nested = Min (summed_score, parent_score)
    token = Reshape (child, flat)
    candidate_score = Reshape (candidate_nested, flat)
    frontier_score, frontier = TopK (candidate_score, k_1)
}
""".replace("SETTINGS_OF", SETTINGS_OF).replace("FILTERED", FILTERED)
