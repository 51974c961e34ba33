"""TreeExpand in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION

# Log-probabilities are taken of the chosen logits only: the vocabulary is read twice and never written. What couples a
# drafter with the target's draws stands in an If, so that greedy drafting does not pay for it.
_TREE_EXPAND = """
<opset_import: ["" : 24], domain: "outrider">
TreeExpand <top_k, coupling> (logits, score, draws, temperature, top_k_filter, top_p) => (token, candidate_score, frontier)
{
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    behind = Constant <value_ints: ints = [1, 2]> ()
    flat = Constant <value_ints: ints = [0, -1]> ()
    k = Constant <value_int: int = @top_k> ()
    k_1 = Reshape (k, one_1)
    weight = Constant <value_float: float = @coupling> ()

    best, likely = TopK (logits, k_1)
    normaliser = ReduceLogSumExp (logits, last_1)
    log_prob = Sub (best, normaliser)

    heat = Cast <to: int = 1> (temperature)
    nothing = Constant <value_float: float = 0.0> ()
    sampled = Greater (heat, nothing)
    sampled_counted = Cast <to: int = 7> (sampled)
    sampled_any = ReduceMax <keepdims: int = 0> (sampled_counted)
    any_sampled = Cast <to: int = 9> (sampled_any)
    child, own = If (any_sampled) <
        then_branch = coupled () => (int64["B", "F", "K"] child_coupled, float["B", "F", "K"] own_coupled) {
            zero_i = Constant <value_int: int = 0> ()
            one_i = Constant <value_int: int = 1> ()
            one_f = Constant <value_float: float = 1.0> ()
            none = Constant <value_int: int = -1> ()
            endless = Constant <value_int: int = 4611686018427387904> ()
            lowest = Constant <value_float: float = -3.4e38> ()
            highest = Constant <value_float: float = 3.4e38> ()
            wide = Constant <value_ints: ints = [64]> ()
            sampled_3 = Unsqueeze (sampled, behind)
            heat_or_1 = Where (sampled, heat, one_f)
            heat_3 = Unsqueeze (heat_or_1, behind)
            scaled = Div (logits, heat_3)
            size_1 = Shape <start: int = 2, end: int = 3> (logits)
            width_1 = Min (size_1, wide)
            sorted, sorted_token = TopK (scaled, width_1)
            first = ReduceMax (sorted, last_1)
            shifted = Sub (scaled, first)
            weights = Exp (shifted)
            total = ReduceSum (weights, last_1)
            width = Squeeze (width_1)
            rank = Range (zero_i, width, one_i)
            unlimited = Equal (top_k_filter, zero_i)
            most = Where (unlimited, endless, top_k_filter)
            most_3 = Unsqueeze (most, behind)
            within_k = Less (rank, most_3)
            within_k_f = Cast <to: int = 1> (within_k)
            sorted_shifted = Sub (sorted, first)
            sorted_all = Exp (sorted_shifted)
            sorted_weights = Mul (sorted_all, within_k_f)
            sorted_total = ReduceSum (sorted_weights, last_1)
            few = LessOrEqual (most_3, width)
            survivors = Where (few, sorted_total, total)
            before = CumSum <exclusive: int = 1> (sorted_weights, none)
            share = Cast <to: int = 1> (top_p)
            share_3 = Unsqueeze (share, behind)
            goal_p = Mul (share_3, survivors)
            full = GreaterOrEqual (share_3, one_f)
            below_p = Less (before, goal_p)
            within_p = Or (below_p, full)
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
            kept_weights = Mul (weights, kept_f)
            summed = CumSum (kept_weights, none)
            summed_total = ReduceMax (summed, last_1)
            draws_3 = Unsqueeze (draws, behind)
            goal = Mul (draws_3, summed_total)
            passed = LessOrEqual (summed, goal)
            passed_i = Cast <to: int = 7> (passed)
            chosen = ReduceSum (passed_i, last_1)
            last_token = Sub (size_1, one_1)
            chosen_inside = Min (chosen, last_token)
            coupled_child = Where (sampled_3, chosen_inside, none)
            among = Equal (likely, coupled_child)
            among_i = Cast <to: int = 7> (among)
            found = ReduceMax (among_i, last_1)
            absent = Equal (found, zero_i)
            place = Range (zero_i, k, one_i)
            last_place = Sub (k, one_i)
            at_end = Equal (place, last_place)
            absent_end = And (absent, at_end)
            replaced = And (absent_end, sampled_3)
            child_coupled = Where (replaced, coupled_child, likely)
            is_it = Equal (child_coupled, coupled_child)
            others = Sub (one_f, weight)
            others_log = Log (others)
            weight_log = Log (weight)
            discounted = Add (log_prob, others_log)
            sampled_own = Where (is_it, weight_log, discounted)
            own_coupled = Where (sampled_3, sampled_own, log_prob)
        },
        else_branch = greedy () => (int64["B", "F", "K"] child_greedy, float["B", "F", "K"] own_greedy) {
            child_greedy = Identity (likely)
            own_greedy = Identity (log_prob)
        }
    >
    parent_score = Unsqueeze (score, last_1)
    candidate_nested = Add (own, parent_score)
    token = Reshape (child, flat)
    candidate_score = Reshape (candidate_nested, flat)
    frontier_score, frontier = TopK (candidate_score, k_1)
}
"""


@cache
def tree_expand_function() -> onnx.FunctionProto:
    """TreeExpand in standard ops. TopK puts the lower index first among equals, which the tree relies on."""
    return parser.parse_function(_TREE_EXPAND)


def tree_expand_schema() -> defs.OpSchema:
    """What ONNX is told of the op; its meaning stands in `plugins.schemas`."""
    parameter, attribute = defs.OpSchema.FormalParameter, defs.OpSchema.Attribute
    return defs.OpSchema(
        "TreeExpand",
        DOMAIN,
        VERSION,
        doc="Children of a draft tree's frontier nodes, and which of them are the next frontier.",
        inputs=[
            parameter("logits", "F", "[B, F, V], of the frontier nodes of each tree"),
            parameter("score", "F", "[B, F], of each frontier node, summed from the root"),
            parameter("draws", "F", "[B], the target's draw at the children's position"),
            parameter("temperature", "D", "[B], 0 is greedy"),
            parameter("top_k_filter", "I", "[B], 0 is off"),
            parameter("top_p", "D", "[B], 1 is off"),
        ],
        outputs=[
            parameter("token", "I", "[B, F * top_k], node-major, best first"),
            parameter("candidate_score", "F", "[B, F * top_k]"),
            parameter("frontier", "I", "[B, top_k], indices of the next frontier among the candidates, best first"),
        ],
        type_constraints=[
            ("F", ["tensor(float)"], "Scores are summed in float32."),
            ("D", ["tensor(double)"], "Sampling settings, as the target has them."),
            ("I", ["tensor(int64)"], "Indices."),
        ],
        attributes=[
            attribute("top_k", defs.OpSchema.AttrType.INT, "children of a node, and nodes of a frontier"),
            attribute("coupling", defs.OpSchema.AttrType.FLOAT, "how likely the child at the target's draw is right"),
        ],
    )
