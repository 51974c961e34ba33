"""TreeExpand in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from plugins.onnx_ops.domain import DOMAIN, VERSION

# Log-probabilities are taken of the chosen logits only: the vocabulary is read twice and never written.
_TREE_EXPAND = """
<opset_import: ["" : 24], domain: "outrider">
TreeExpand <top_k> (logits, score) => (token, candidate_score, frontier)
{
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    flat = Constant <value_ints: ints = [0, -1]> ()
    k = Constant <value_int: int = @top_k> ()
    k_1 = Reshape (k, one_1)

    best, token_nested = TopK (logits, k_1)
    normaliser = ReduceLogSumExp (logits, last_1)
    log_prob = Sub (best, normaliser)
    parent_score = Unsqueeze (score, last_1)
    candidate_nested = Add (log_prob, parent_score)
    token = Reshape (token_nested, flat)
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
            parameter("score", "F", "[B, F], log-probability of each frontier node, summed from the root"),
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
        attributes=[attribute("top_k", defs.OpSchema.AttrType.INT, "children of a node, and nodes of a frontier")],
    )
