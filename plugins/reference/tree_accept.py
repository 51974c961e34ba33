"""Walk each draft tree along the target's own choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.sample import SamplingSlots
from outrider.plugins.schema import Purpose


@dataclass(frozen=True)
class Accepted:
    """The tokens that a step committed, and the new tokens whose KV stays.

    committed int64 `[M]`: token j of a tree stands j after the place of the tree's root in `logit_indices`; -1
    elsewhere. accepted_count int64 `[trees]`; kept_indices int64 `[kept]`, ascending.
    """

    committed: NDArray[np.int64]
    accepted_count: NDArray[np.int64]
    kept_indices: NDArray[np.int64]


def walk_trees(
    logit_indices: NDArray[np.int64], parent: NDArray[np.int64], step: Callable[[int], tuple[int, int | None]]
) -> Accepted:
    """Walk each tree from its root: `step(node)` returns the token after the node, and the next node or None."""
    rows = logit_indices.tolist()
    committed = np.full(len(rows), -1, dtype=np.int64)
    counts = []
    kept = [row for row in range(len(parent)) if row not in rows]

    for place, root in enumerate(rows):
        if parent[root] in rows:
            continue  # a drafted node
        tokens: list[int] = []
        node: int | None = root
        while node is not None:
            kept.append(node)
            token, node = step(node)
            tokens.append(token)
        committed[place : place + len(tokens)] = tokens
        counts.append(len(tokens))

    return Accepted(committed, np.array(counts, dtype=np.int64), np.array(sorted(kept), dtype=np.int64))


def tree_accept(
    logits: NDArray[np.float32],
    logit_indices: NDArray[np.int64],
    positions: NDArray[np.int64],
    branch: NDArray[np.int64],
    slots: SamplingSlots,
    token_ids: NDArray[np.int64],
    parent: NDArray[np.int64],
    purpose: Purpose = Purpose.TARGET,
) -> Accepted:
    """Walk every tree of the step along the target's own choices; shapes as in the schema of TreeAccept."""
    place_of = {row: place for place, row in enumerate(logit_indices.tolist())}

    def step(node: int) -> tuple[int, int | None]:
        x = slots.choose(logits[place_of[node]], int(branch[node]), int(positions[node]), purpose)
        return x, next((row for row in place_of if parent[row] == node and token_ids[row] == x), None)

    return walk_trees(logit_indices, parent, step)
