"""A token drawn from a drafter's own distribution, and that distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.tree_expand import DraftSettings, kept_weights


def draft_sample(logits: NDArray[np.float32], settings: DraftSettings) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return `(token [B, F], probability [B, F, V])`; shapes as in the schema of DraftSample, sums in float64."""
    trees, nodes, _ = logits.shape
    token = np.zeros((trees, nodes), np.int64)
    probability = np.zeros(logits.shape)
    for tree in range(trees):
        for node in range(nodes):
            row = logits[tree, node].astype(np.float64)
            if settings.row(tree).temperature > 0:
                weights = kept_weights(row, settings, tree)
                token[tree, node] = (weights / settings.noise[tree]).argmax()
                probability[tree, node] = weights / weights.sum()
            else:
                token[tree, node] = row.argmax()
                probability[tree, node, row.argmax()] = 1.0
    return token, probability
