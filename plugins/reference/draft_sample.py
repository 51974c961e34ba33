"""A token drawn from a drafter's own distribution, and that distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.reference.tree_expand import filtered_weights_of_draft


def draft_sample(
    logits: NDArray[np.float32],
    draws: NDArray[np.float32],
    temperature: NDArray[np.float64],
    top_k_filter: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return `(token [B, F], probability [B, F, V])`; shapes as in the schema of DraftSample, sums in float64."""
    trees, nodes, size = logits.shape
    token = np.zeros((trees, nodes), np.int64)
    probability = np.zeros((trees, nodes, size))
    for tree in range(trees):
        for node in range(nodes):
            row = logits[tree, node].astype(np.float64)
            if temperature[tree] > 0:
                weights = filtered_weights_of_draft(
                    row, float(temperature[tree]), int(top_k_filter[tree]), float(top_p[tree])
                )
                summed = np.cumsum(weights)
                token[tree, node] = min(int((summed <= draws[tree] * summed[-1]).sum()), size - 1)
                probability[tree, node] = weights / summed[-1]
            else:
                token[tree, node] = row.argmax()
                probability[tree, node, row.argmax()] = 1.0
    return token, probability
