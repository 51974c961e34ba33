"""TreeExpand in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from outrider.plugins.onnx_ops.domain import DOMAIN, VERSION
from outrider.plugins.onnx_ops.filtered import FILTERED, SETTINGS_OF, settings_parameters

# Log-probabilities are computed for the chosen logits only: the vocabulary is read twice and never written. The nodes
# for the target's races are in an If, so that greedy drafting does not pay for them.
_TREE_EXPAND = """
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
"""


@cache
def tree_expand_function() -> onnx.FunctionProto:
    """Return the function body of TreeExpand. The tree needs TopK's order: the lower index first among equals."""
    return parser.parse_function(_TREE_EXPAND.replace("SETTINGS_OF", SETTINGS_OF).replace("FILTERED", FILTERED))


def tree_expand_schema() -> defs.OpSchema:
    """Return the op's schema for ONNX; `plugins.schemas` defines its meaning."""
    parameter, attribute = defs.OpSchema.FormalParameter, defs.OpSchema.Attribute
    return defs.OpSchema(
        "TreeExpand",
        DOMAIN,
        VERSION,
        doc="Children of a draft tree's frontier nodes, and which of them are the next frontier.",
        inputs=[
            parameter("logits", "F", "[B, F, V], of the frontier nodes of each tree"),
            parameter("score", "F", "[B, F], of each frontier node, summed from the root"),
            *settings_parameters(),
        ],
        outputs=[
            parameter("token", "I", "[B, F * top_k], node-major, best first"),
            parameter("candidate_score", "F", "[B, F * top_k]"),
            parameter("frontier", "I", "[B, top_k], indices of the next frontier among the candidates, best first"),
        ],
        type_constraints=[
            ("F", ["tensor(float)"], "Scores are summed in float32."),
            ("I", ["tensor(int64)"], "Indices."),
        ],
        attributes=[
            attribute("top_k", defs.OpSchema.AttrType.INT, "children of a node, and nodes of a frontier"),
            attribute("doubt", defs.OpSchema.AttrType.FLOAT, "how often the drafter's race tells nothing"),
        ],
    )
