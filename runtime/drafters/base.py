"""The contract of drafters: a draft, and the contract of drafters that run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.native import NgramMemory
from outrider.runtime.sampling import SamplingParams


@dataclass
class Draft:
    """Drafted nodes after a tip, which is node 0, ancestors first: node i + 1 hangs from node `parent[i]`.

    `scores` are log-probabilities summed from the tip, a node each, where the drafter knows them. `probs`, f32
    `[nodes, vocab]`, are the distributions that the tokens of a chain were drawn from, for acceptance by rejection.
    `left_out` more nodes were drafted, and are not worth what verifying them costs. `by_host`: a drafter on the host
    gave it.

    Of a draft in place, the drafter's engine writes the nodes into the target's step itself, of a sequence that is
    alone: the arrays are views of the step, and `program` runs that engine and verifies.
    """

    token_ids: Sequence[int] | NDArray[np.int64]
    parent: Sequence[int] | NDArray[np.int64]
    scores: Sequence[float] | NDArray[np.float32] | None = None
    probs: NDArray[np.float32] | None = None
    left_out: int = 0
    by_host: bool = False
    program: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def shape(self) -> tuple[list[int], list[float]]:
        """Return the index of each node's parent among the nodes, -1 for the tip, and the nodes' scores, which are
        known."""
        assert self.scores is not None
        return (np.asarray(self.parent) - 1).tolist(), np.asarray(self.scores).tolist()


def chain_draft(tokens: Sequence[int]) -> Draft:
    """Return a chain after the tip."""
    return Draft(tokens, range(len(tokens)))


NOTHING = Draft((), ())


def clip_draft(
    parent: Sequence[int],
    scores: Sequence[float] | NDArray[np.float32] | None,
    tokens: int | None,
    depth: int | None,
) -> list[int]:
    """Return the nodes of a draft that stay, ascending, with their ancestors: at most `tokens`, the likeliest, and at
    most `depth` one after another.
    """
    depths: list[int] = []
    for each in parent:
        depths.append(1 if each < 0 else depths[each] + 1)
    nodes = [node for node in range(len(parent)) if depth is None or depths[node] <= depth]
    if tokens is None or len(nodes) <= tokens:
        return nodes
    return sorted(sorted(nodes, key=lambda node: 0.0 if scores is None else -float(scores[node]))[:tokens])


class HostDrafter(Protocol):
    """Proposes drafts for one sequence, on the host. It owns what it knows of the sequence's tokens.

    The output is the target's for any proposal. It receives committed tokens; where some are tentative,
    `mark_tentative` says from which on.
    """

    @property
    def filler_top_k(self) -> int:
        """How many of the target's likeliest tokens it wants to see of each token committed; 0 for none."""

    @property
    def name(self) -> str:
        """The drafter's name in the plan."""

    def recall_from(self, memory: NgramMemory | None) -> None:
        """Draft from what other generations have put out too, or from the sequence alone."""

    def truncate(self, length: int) -> None:
        """The sequence now has `length` tokens, those before them unchanged."""

    def mark_tentative(self, length: int | None) -> None:
        """Tokens from `length` on are tentative: nothing is learned from them. None: they were retracted."""

    def sync(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that are new."""

    def observe(self, index: int, likely: NDArray[np.int64]) -> None:
        """Token `index` of the sequence has been chosen; `likely` are the target's likeliest there, best last."""

    def foresee(self, tokens: Sequence[int], limit: int, sampling: SamplingParams) -> int:
        """How many nodes `draft` would write after `tokens`."""

    def draft(
        self,
        limit: int,
        token_ids: NDArray[np.int64],
        parent: NDArray[np.int64],
        score: NDArray[np.float32],
        root: int,
        sampling: SamplingParams,
    ) -> int:
        """Write at most `limit` nodes of a draft tree whose root, the tip, is node `root`; return how many.

        `sampling` says how the target chooses: a drafter may run the target's races with what it knows.

        `token_ids` and `parent`, int64 [nodes], and `score`, f32 [nodes], are arrays that several trees may share. The
        nodes go to indices root + 1, root + 2, ...; `parent` holds indices into the same arrays, ancestors come before
        descendants, and siblings are distinct tokens; `score` is the logarithm of the chance that the target reaches
        the node. Nothing else of the arrays is touched. The caller has room for `limit` nodes
        after the root.
        """
