"""A record of one round: the drafted tree, the accepted nodes, and the tokens that came instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.drafters.base import Draft
from outrider.runtime.execution.step import TargetStep


@dataclass(frozen=True)
class Node:
    """A drafted token. `parent` counts nodes, 0 is the tip.

    `probability` is the drafter's that the target chooses it after its parent, None where it has none: greedy, and by
    rejection, its own probability of the token; else what TreeExpand makes of that with the target's noise. By
    rejection, a node that the target came to was accepted where `draw` <= `ratio`, r and p / q of the rule; else they
    are None.
    """

    token_id: int
    parent: int
    depth: int
    probability: float | None
    accepted: bool
    draw: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class RoundTrace:
    """`position` is that of the first token committed. `left_out` nodes more were drafted, and were not worth what
    verifying them costs.

    `committed` are the accepted tokens and the correction (the bonus, after a draft accepted whole), which is missing
    where the generation ended before it.
    """

    position: int
    nodes: list[Node]
    committed: list[int]
    left_out: int = 0

    def cut(self, kept: int) -> RoundTrace:
        """Return the round with only the first `kept` of its tokens."""
        if kept == len(self.committed):
            return self
        nodes = [replace(node, accepted=node.accepted and node.depth <= kept) for node in self.nodes]
        return replace(self, nodes=nodes, committed=self.committed[:kept])


Watcher = Callable[[RoundTrace], None]


def read_round(
    step: TargetStep,
    root: int,
    first: int,
    drafted: int,
    committed: list[int],
    accepted: NDArray[np.int64],
    draft: Draft | None,
    trials: NDArray[np.float64] | None,
) -> RoundTrace:
    """The round of one sequence that has just run: the tip is token `root` of the step, with logits index `first`, and
    `drafted` nodes stand after it.

    `accepted` lists those of the step's tokens that were accepted; `trials` are those of ChainAccept, by logits index.
    """
    scores = None if draft is None else draft.scores
    on_path = set(accepted.tolist())

    def score(node: int) -> float:
        """Log-probability summed from the tip, which is node 0."""
        assert scores is not None
        return float(scores[node - 1]) if node else 0.0

    nodes = []
    for node in range(1, drafted + 1):
        token = root + node
        parent = int(step.parent[token]) - root
        weighed = trials is not None and not np.isnan(trials[first + node, 0])
        draw, ratio = trials[first + node].tolist() if trials is not None and weighed else (None, None)
        nodes.append(
            Node(
                token_id=int(step.token_ids[token]),
                parent=parent,
                depth=int(step.positions[token] - step.positions[root]),
                probability=None if scores is None else exp(score(node) - score(parent)),
                accepted=token in on_path,
                draw=draw,
                ratio=ratio,
            )
        )
    position = int(step.positions[root]) + 1
    return RoundTrace(position, nodes, committed, 0 if draft is None else draft.left_out)
