"""A record of one round: the drafted tree, the accepted nodes, and the tokens that came instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


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
