"""What one round did, for those who want to see it: the drafted tree, what was accepted, what came instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

from runtime.drafters.base import Drafter
from runtime.execution.step import TargetStep


@dataclass(frozen=True)
class Node:
    """A drafted token. `parent` counts nodes, 0 is the tip.

    `probability` is the drafter's that the target chooses it behind its parent, None where it has none: greedy, and by
    rejection, its own probability of the token; else what TreeExpand makes of that at the target's draw. By rejection,
    a node that the target came to was accepted where `draw` <= `ratio`, r and p / q of the rule; else they are None.
    """

    token_id: int
    parent: int
    depth: int
    probability: float | None
    accepted: bool
    draw: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Round:
    """`position` is that of the first token committed. `entropy` is the drafter's, where that decides the length.

    `committed` are the accepted tokens and the correction (the bonus, behind a draft accepted whole), which is missing
    where the generation ended before it.
    """

    position: int
    nodes: list[Node]
    committed: list[int]
    entropy: float | None


Watcher = Callable[[Round], None]


def read_round(
    step: TargetStep,
    pending: int,
    committed: list[int],
    accepted: int,
    kept: NDArray[np.int64] | None,
    drafter: Drafter | None,
) -> Round:
    """The round that has just run; the first `accepted` of `committed` were drafted by `drafter`.

    `kept` lists the step's rows that stay.
    """
    scores, trials = (None, None) if drafter is None else (drafter.scores, drafter.trials)
    tip = pending - 1
    on_path = set() if kept is None else {int(row) - tip for row in kept[pending : pending + accepted]}
    nodes = []
    for node in range(1, step.drafted + 1):
        row = tip + node
        parent = int(step.parent[row]) - tip
        draw, ratio = (None, None) if trials is None or np.isnan(trials[node, 0]) else trials[node].tolist()
        nodes.append(
            Node(
                token_id=int(step.token_ids[row]),
                parent=parent,
                depth=int(step.positions[row] - step.positions[tip]),
                probability=None if scores is None else exp(float(scores[node] - scores[parent])),
                accepted=node in on_path,
                draw=draw,
                ratio=ratio,
            )
        )
    return Round(int(step.positions[tip]) + 1, nodes, committed, None if drafter is None else drafter.entropy)
