"""TreeRerank: the best candidates of all levels, as the nodes of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.cuda.launches import make_launch
from outrider.plugins.ops.op import Op
from outrider.plugins.ops.tree_expand import CANDIDATES, best
from outrider.plugins.schema import INTEGER, AttributeSpec, OpSchema, TensorSpec
from outrider.plugins.tensorrt.plugin import Plugin

_NODES = ("trees", "nodes - 1")

SCHEMA = OpSchema(
    name="TreeRerank",
    version=2,
    doc="""The nodes - 1 best candidates of all levels, as the nodes of a draft tree after its root.

    A child scores no more than its parent and comes after it, so ancestors of a chosen candidate are chosen too: of
    equals, the lower index comes first. Nodes keep the order of their indices: ancestors before descendants. candidate
    holds these indices, ascending; parent counts nodes, 0 is the root. Stands in graphs only: a function body of
    standard ops, or the CUDA kernel.
    Source: EAGLE-2 (arXiv 2406.16858).""",
    inputs=(
        TensorSpec("candidate_token", INTEGER, CANDIDATES),
        TensorSpec("candidate_score", "float32", CANDIDATES),
        TensorSpec("candidate_parent", INTEGER, CANDIDATES),
        TensorSpec("candidate_depth", INTEGER, ("candidates",)),
    ),
    outputs=(
        TensorSpec("candidate", INTEGER, _NODES),
        TensorSpec("token", INTEGER, _NODES),
        TensorSpec("parent", INTEGER, _NODES),
        TensorSpec("depth", INTEGER, _NODES),
        TensorSpec("score", "float32", _NODES),
    ),
    attributes=(AttributeSpec("nodes", int),),
)

_LAUNCH = make_launch(
    SCHEMA,
    kernel="outrider_tree_rerank",
    numbers=("candidates", "nodes"),
    blocks=lambda s: s["trees"],
)
_PLUGIN = Plugin(
    name="TreeRerank",
    launch=_LAUNCH,
    inputs=SCHEMA.inputs,
    outputs=SCHEMA.outputs,
    attributes=("nodes",),
    derived={"nodes - 1": lambda s: s["nodes"] - 1},
    guard="0 < nodes && nodes <= candidates + 1",
)
OP = Op(SCHEMA, (_PLUGIN,), _LAUNCH)


@dataclass(frozen=True)
class Reranking:
    """Trees after their roots, arrays `[B, nodes - 1]`; `candidate` indexes candidates, `parent` nodes (0: root)."""

    candidate: NDArray[np.int64]
    token: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    score: NDArray[np.float32]


def tree_rerank(
    candidate_token: NDArray[np.int64],
    candidate_score: NDArray[np.float32],
    candidate_parent: NDArray[np.int64],
    candidate_depth: NDArray[np.int64],
    nodes: int,
) -> Reranking:
    """Choose the nodes of each tree among the candidates; shapes as in the schema of TreeRerank."""
    trees = len(candidate_score)
    parent = np.zeros((trees, nodes - 1), np.int64)
    chosen = np.array([sorted(best(scores.astype(np.float64), nodes - 1)) for scores in candidate_score], np.int64)
    for tree in range(trees):
        node_of = {-1: 0} | {int(candidate): node for node, candidate in enumerate(chosen[tree], start=1)}
        parent[tree] = [node_of[int(candidate_parent[tree, candidate])] for candidate in chosen[tree]]
    return Reranking(
        chosen,
        np.take_along_axis(candidate_token, chosen, axis=1),
        parent,
        candidate_depth[chosen],
        np.take_along_axis(candidate_score, chosen, axis=1),
    )
