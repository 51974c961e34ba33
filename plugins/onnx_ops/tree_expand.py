"""TreeExpand in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION
from plugins.onnx_ops.inverse_cdf import INVERSE_CDF

# Log-probabilities are taken of the chosen logits only: the vocabulary is read twice and never written. What couples a
# drafter with the target's draws stands in an If, so that greedy drafting does not pay for it.
_TREE_EXPAND = """
<opset_import: ["" : 24], domain: "outrider">
TreeExpand <top_k, coupling> (logits, score, draws, temperature, top_k_filter, top_p)
    => (token, candidate_score, frontier)
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
            INVERSE_CDF
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
    return parser.parse_function(_TREE_EXPAND.replace("INVERSE_CDF", INVERSE_CDF))


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
