"""A drafter's distribution under a branch's filters, in standard ops, which the bodies of several ops include."""

from __future__ import annotations

from outrider.plans.sampling import SETTINGS, Sampling

# Inputs: draft_sampling [B, SETTINGS], and last_1 = [-1]. Results [B, 1, 1]: each setting, and whether it is to sample.
SETTINGS_OF = f"""
columns = Unsqueeze (draft_sampling, last_1)
{", ".join(Sampling._fields)} = Split <axis: int = 1, num_outputs: int = {SETTINGS}> (columns)
nothing = Constant <value_float: float = 0.0> ()
sampled = Greater (temperature, nothing)
"""

# Inputs: logits [B, F, V], noise [B, V], what SETTINGS_OF gives, and last_1. Results: weights [B, F, V] at the branch's
# temperature, total [B, F, 1], their sum, kept_weights [B, F, V], the weights of the tokens that the filters keep, else
# 0, and pace [B, F, V], these over the noise.
# The cuts of top-k and top-p are searched among the 64 likeliest tokens: sorting a whole vocabulary costs more than
# drafting. Temperatures below 1e-30 count as 1e-30, near the end of float32.
FILTERED = """
one_f = Constant <value_float: float = 1.0> ()
coolest = Constant <value_float: float = 1e-30> ()
heat_warm = Max (temperature, coolest)
heat = Where (sampled, heat_warm, one_f)
largest = ReduceMax (logits, last_1)
lowered = Sub (logits, largest)
scaled = Div (lowered, heat)
weights = Exp (scaled)
total = ReduceSum (weights, last_1)
limited = GreaterOrEqual (top_k, one_f)
cut = Less (top_p, one_f)
filtered = Or (limited, cut)
filtered_i = Cast <to: int = 7> (filtered)
filtered_any = ReduceMax <keepdims: int = 0> (filtered_i)
any_filtered = Cast <to: int = 9> (filtered_any)
within_cuts = If (any_filtered) <
    then_branch = filters () => (float["B", "F", "V"] kept_some) {
        lowest = Constant <value_float: float = -3.4e38> ()
        highest = Constant <value_float: float = 3.4e38> ()
        wide = Constant <value_ints: ints = [64]> ()
        axis = Constant <value_int: int = -1> ()
        vocabulary_1 = Shape <start: int = 2, end: int = 3> (logits)
        width_1 = Min (vocabulary_1, wide)
        sorted, sorted_token = TopK (scaled, width_1)
        width = Squeeze (width_1)
        width_f = Cast <to: int = 1> (width)
        rank = Range (nothing, width_f, one_f)
        most = Where (limited, top_k, highest)
        within_k = Less (rank, most)
        within_k_f = Cast <to: int = 1> (within_k)
        sorted_all = Exp (sorted)
        sorted_weights = Mul (sorted_all, within_k_f)
        sorted_total = ReduceSum (sorted_weights, last_1)
        few = LessOrEqual (most, width_f)
        survivors = Where (few, sorted_total, total)
        before_it = CumSum <exclusive: int = 1> (sorted_weights, axis)
        goal_p = Mul (top_p, survivors)
        full = GreaterOrEqual (top_p, one_f)
        below_p = Less (before_it, goal_p)
        first = Less (rank, one_f)
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
weighs = GreaterOrEqual (weights, min_p)
kept_weights = Where (weighs, within_cuts, nothing)
middle_1 = Constant <value_ints: ints = [1]> ()
noise_3 = Unsqueeze (noise, middle_1)
pace = Div (kept_weights, noise_3)
"""
