"""A drafter's distribution under a branch's filters, in standard ops, which the bodies of several ops include."""

from __future__ import annotations

from onnx import defs

# Inputs: logits [B, F, V], noise [B, V], temperature, top_k_filter, top_p, min_p and sampled (bool) [B], and the
# constants one_1 = [1], last_1 = [-1], behind = [1, 2]. Results: weights [B, F, V] at the branch's temperature, total
# [B, F, 1], their sum, kept_weights [B, F, V], the weights of the tokens that the filters keep, else 0, pace [B, F, V],
# these over the noise, and sampled_3 [B, 1, 1].
# The cuts of top-k and top-p are searched among the 64 likeliest tokens: sorting a whole vocabulary costs more than
# drafting. Temperatures below 1e-30 count as 1e-30, near the end of float32.
FILTERED = """
zero_i = Constant <value_int: int = 0> ()
one_i = Constant <value_int: int = 1> ()
one_f = Constant <value_float: float = 1.0> ()
sampled_3 = Unsqueeze (sampled, behind)
coolest = Constant <value_float: float = 1e-30> ()
heat_warm = Max (temperature, coolest)
heat = Where (sampled, heat_warm, one_f)
heat_3 = Unsqueeze (heat, behind)
largest = ReduceMax (logits, last_1)
lowered = Sub (logits, largest)
scaled = Div (lowered, heat_3)
weights = Exp (scaled)
total = ReduceSum (weights, last_1)
limited = Greater (top_k_filter, zero_i)
cut = Less (top_p, one_f)
filtered = Or (limited, cut)
filtered_i = Cast <to: int = 7> (filtered)
filtered_any = ReduceMax <keepdims: int = 0> (filtered_i)
any_filtered = Cast <to: int = 9> (filtered_any)
within_cuts = If (any_filtered) <
    then_branch = filters () => (float["B", "F", "V"] kept_some) {
        endless = Constant <value_int: int = 4611686018427387904> ()
        lowest = Constant <value_float: float = -3.4e38> ()
        highest = Constant <value_float: float = 3.4e38> ()
        wide = Constant <value_ints: ints = [64]> ()
        axis = Constant <value_int: int = -1> ()
        vocabulary_1 = Shape <start: int = 2, end: int = 3> (logits)
        width_1 = Min (vocabulary_1, wide)
        sorted, sorted_token = TopK (scaled, width_1)
        width = Squeeze (width_1)
        rank = Range (zero_i, width, one_i)
        most = Where (limited, top_k_filter, endless)
        most_3 = Unsqueeze (most, behind)
        within_k = Less (rank, most_3)
        within_k_f = Cast <to: int = 1> (within_k)
        sorted_all = Exp (sorted)
        sorted_weights = Mul (sorted_all, within_k_f)
        sorted_total = ReduceSum (sorted_weights, last_1)
        few = LessOrEqual (most_3, width)
        survivors = Where (few, sorted_total, total)
        before_it = CumSum <exclusive: int = 1> (sorted_weights, axis)
        share_3 = Unsqueeze (top_p, behind)
        goal_p = Mul (share_3, survivors)
        full = GreaterOrEqual (share_3, one_f)
        below_p = Less (before_it, goal_p)
        first = Less (rank, one_i)
        below_or_first = Or (below_p, first)
        within_p = Or (below_or_first, full)
        within = And (within_k, within_p)
        edge_of = Where (within, sorted, highest)
        edge = ReduceMin (edge_of, last_1)
        within_i = Cast <to: int = 7> (within)
        within_count = ReduceSum (within_i, last_1)
        open = Equal (within_count, width)
        not_few = Not (few)
        whole = And (open, not_few)
        threshold = Where (whole, lowest, edge)
        kept = GreaterOrEqual (scaled, threshold)
        kept_f = Cast <to: int = 1> (kept)
        kept_some = Mul (weights, kept_f)
    },
    else_branch = all () => (float["B", "F", "V"] kept_all) {
        kept_all = Identity (weights)
    }
>
least_3 = Unsqueeze (min_p, behind)
weighs = GreaterOrEqual (weights, least_3)
nothing = Constant <value_float: float = 0.0> ()
kept_weights = Where (weighs, within_cuts, nothing)
middle_1 = Constant <value_ints: ints = [1]> ()
noise_3 = Unsqueeze (noise, middle_1)
pace = Div (kept_weights, noise_3)
"""


def settings_parameters() -> list[defs.OpSchema.FormalParameter]:
    """Return the inputs that say what a drafter knows of a branch, for the schemas of ops that include FILTERED."""
    parameter = defs.OpSchema.FormalParameter
    return [
        parameter("noise", "F", "[B, V], of the race that chooses the children"),
        parameter("temperature", "F", "[B], 0 is greedy"),
        parameter("top_k_filter", "I", "[B], 0 is off"),
        parameter("top_p", "F", "[B], 1 is off"),
        parameter("min_p", "F", "[B], 0 is off"),
    ]
