"""Recorded draft trees, and how much of each a smaller tree would have had accepted.

A tree of `top_k` children, recorded to some depth with all its nodes, holds every shallower and smaller one: a level
grows in the same way however many follow it, and the nodes that are kept are the best of those levels. So for
one `top_k` the replay is the definition itself, not a model of it, as long as the recording kept enough nodes: of a
shallower tree it knows those that were among its own best, and what it lacks counts as refused.
One thing is assumed: that the tips at which the recorded rounds began are like those of other trees' rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plans.manifest import Tree


@dataclass(frozen=True)
class DraftedTree:
    """Nodes after the tip, ancestors first and siblings best first: `score` f64 and `depth` int64 `[nodes - 1]`.

    `score` is summed from the tip; the tip's children have depth 1. `path` lists the accepted nodes, by index here, and
    `ranks` which of their siblings they were, 0 the best.
    """

    score: NDArray[np.float64]
    depth: NDArray[np.int64]
    path: tuple[int, ...]
    ranks: tuple[int, ...]

    def nodes_needed(self, depth: int) -> list[int]:
        """Nodes, tip included, that a tree with `depth` levels after the tip's children must keep to have 1, 2 ...
        tokens accepted; as many entries as such a tree can have accepted."""
        inside = np.flatnonzero(self.depth <= depth + 1)
        rank = np.empty(len(self.depth), np.int64)
        rank[inside[np.argsort(-self.score[inside], kind="stable")]] = np.arange(len(inside))
        path = [node for node in self.path if self.depth[node] <= depth + 1]
        return np.maximum.accumulate(rank[path] + 2).tolist() if path else []  # the tip, and counting from 1


def tokens_per_verify(trees: Sequence[DraftedTree], depth: int, most: int) -> NDArray[np.float64]:
    """Mean tokens that a round commits with `depth` levels, by number of nodes: f64 `[most + 1]`, 1 at 0 and 1."""
    committed = np.zeros(most + 1)
    for tree in trees:
        for needed in tree.nodes_needed(depth):
            committed[min(needed, most + 1) :] += 1
    return 1 + committed / max(len(trees), 1)


def largest(top_k: int, depth: int, most: int) -> int:
    """Nodes of the largest tree of this shape that keeps to `most`."""
    return min(most, 1 + Tree(top_k=top_k, depth=depth, nodes=2).candidates)


def acceptance_by_depth(trees: Sequence[DraftedTree]) -> list[float]:
    """At index d, the share of rounds that accepted more than d tokens; up to the deepest that any accepted."""
    deepest = max((len(tree.path) for tree in trees), default=0)
    return [sum(len(tree.path) > d for tree in trees) / len(trees) for d in range(deepest)]


def acceptance_by_rank(trees: Sequence[DraftedTree]) -> list[float]:
    """At index r, the share of accepted nodes that were their parent's r-th best child, the best at 0."""
    ranks = np.bincount([rank for tree in trees for rank in tree.ranks] or [0])
    total = sum(len(tree.ranks) for tree in trees)
    return [float(count) / total for count in ranks] if total else []
