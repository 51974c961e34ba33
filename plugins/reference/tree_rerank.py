"""The best candidates of all levels, as the nodes of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.tree_expand import best


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
