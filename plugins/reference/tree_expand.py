"""Children of a draft tree's frontier, and which of them are expanded next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Expanded:
    """The candidates of one level: `token` int64 and `score` `[B, F * top_k]`, a node's children together, best first.

    `frontier` int64 `[B, top_k]` holds the candidates to expand next, best first.
    """

    token: NDArray[np.int64]
    score: NDArray[np.float64]
    frontier: NDArray[np.int64]


def best(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, largest first; of equal ones the lower index first."""
    return np.argsort(-values, kind="stable")[:count]


def tree_expand(logits: NDArray[np.float32], score: NDArray[np.float32], top_k: int) -> Expanded:
    """`logits` `[B, F, V]` of each tree's frontier nodes, whose `score` `[B, F]` is summed from the root."""
    trees, nodes, _ = logits.shape
    token = np.zeros((trees, nodes * top_k), np.int64)
    summed = np.zeros((trees, nodes * top_k))
    frontier = np.zeros((trees, top_k), np.int64)
    for tree in range(trees):
        for node in range(nodes):
            row = logits[tree, node].astype(np.float64)
            log_probs = row - (row.max() + np.log(np.exp(row - row.max()).sum()))
            children = best(row, top_k)
            place = slice(node * top_k, (node + 1) * top_k)
            token[tree, place] = children
            summed[tree, place] = score[tree, node] + log_probs[children]
        frontier[tree] = best(summed[tree], top_k)
    return Expanded(token, summed, frontier)
