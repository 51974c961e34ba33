"""TreeRerank in standard ops."""

from __future__ import annotations

from functools import cache

import onnx
from onnx import defs, parser

from outrider.plugins.onnx_ops.domain import DOMAIN, VERSION

# The chosen candidates, sorted by index, are the tree: ancestors first. `candidate` ascends, so a parent's node number
# is the count of chosen indices at or below the parent's index; for -1, the root, that count is 0.
_TREE_RERANK = """
<opset_import: ["" : 24], domain: "outrider">
TreeRerank <nodes> (candidate_token, candidate_score, candidate_parent, candidate_depth)
    => (candidate, token, parent, depth, score)
{
    one = Constant <value_int: int = 1> ()
    one_1 = Constant <value_ints: ints = [1]> ()
    last_1 = Constant <value_ints: ints = [-1]> ()
    nodes = Constant <value_int: int = @nodes> ()
    drafted = Sub (nodes, one)
    drafted_1 = Reshape (drafted, one_1)

    best_score, best = TopK (candidate_score, drafted_1)
    candidate, order = TopK <largest: int = 0> (best, drafted_1)
    token = GatherElements <axis: int = 1> (candidate_token, candidate)
    score = GatherElements <axis: int = 1> (candidate_score, candidate)
    depth = Gather (candidate_depth, candidate)
    chosen_parent = GatherElements <axis: int = 1> (candidate_parent, candidate)
    chosen_row = Unsqueeze (candidate, one_1)
    parent_column = Unsqueeze (chosen_parent, last_1)
    at_or_below = LessOrEqual (chosen_row, parent_column)
    counted = Cast <to: int = 7> (at_or_below)
    parent = ReduceSum <keepdims: int = 0> (counted, last_1)
}
"""


@cache
def tree_rerank_function() -> onnx.FunctionProto:
    """Return the function body of TreeRerank. The tree needs TopK's order: the lower index first among equals."""
    return parser.parse_function(_TREE_RERANK)


def tree_rerank_schema() -> defs.OpSchema:
    """Return the op's schema for ONNX; `plugins.schemas` defines its meaning."""
    parameter, attribute = defs.OpSchema.FormalParameter, defs.OpSchema.Attribute
    return defs.OpSchema(
        "TreeRerank",
        DOMAIN,
        VERSION,
        doc="The best candidates of a draft tree, as nodes behind the root.",
        inputs=[
            parameter("candidate_token", "I", "[B, C]"),
            parameter("candidate_score", "F", "[B, C], log-probability summed from the root"),
            parameter("candidate_parent", "I", "[B, C], index among the candidates; -1: the root"),
            parameter("candidate_depth", "I", "[C], 1 for children of the root"),
        ],
        outputs=[
            parameter("candidate", "I", "[B, nodes - 1], index of each node among the candidates, ascending"),
            parameter("token", "I", "[B, nodes - 1], ancestors first"),
            parameter("parent", "I", "[B, nodes - 1], node of the tree; 0 is the root"),
            parameter("depth", "I", "[B, nodes - 1]"),
            parameter("score", "F", "[B, nodes - 1]"),
        ],
        type_constraints=[
            ("F", ["tensor(float)"], "Scores are summed in float32."),
            ("I", ["tensor(int64)"], "Indices."),
        ],
        attributes=[attribute("nodes", defs.OpSchema.AttrType.INT, "nodes of the tree, the root included")],
    )
