"""What proposes tokens for the branches of a run, and how the nodes that a pass verifies are divided among them.

A pass verifies so many nodes. Where more are drafted, every branch has its share, and what a branch does not need goes
to the others; of trees, the nodes that are likeliest of all are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from math import log

import numpy as np
from numpy.typing import NDArray

from plans.manifest import Drafter, GraphDrafter, NgramDrafter
from runtime.drafters import HostDrafter, make_host_drafter
from runtime.drafters.branches import EngineBranches, Tree
from runtime.kv.branch_arena import BranchArena
from runtime.kv.branches import Branch, Draft

# A node that is less likely to be accepted than this costs a pass that many branches share more than it brings.
_WORTH = log(0.2)


@dataclass
class Asking:
    """One branch and what drafts for it: n-grams, an engine, or the one where the other foresees too little."""

    branch: Branch
    tokens: list[int]  # the prefix, and the branch's own
    host: HostDrafter | None = None
    engine: str | None = None
    least: int = 1  # tokens that n-grams must foresee
    reach: int = 8  # tokens that their chain may have, by how much of the last ones was accepted
    drafted: int = 0  # tokens of the last one


class BranchDrafting:
    """The drafters of one run by name. A round: `draft`, the pass, `follow`; `finish` for a branch that is over."""

    def __init__(self, drafters: Sequence[Drafter], engines: Mapping[str, EngineBranches], nodes: int) -> None:
        self._settings = {drafter.name: drafter for drafter in drafters}
        self._engines, self._nodes = engines, nodes
        self._active: list[EngineBranches] = []
        self._prefix: list[int] = []
        self._chain = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)

    @property
    def arenas(self) -> list[BranchArena]:
        """Those of the drafters that this run has."""
        return [engine.arena for engine in self._active]

    @property
    def active(self) -> Sequence[EngineBranches]:
        """The engines that this run has."""
        return self._active

    def reset(self) -> None:
        """Forget everything."""
        for engine in self._engines.values():
            engine.reset()

    def has_prefix(self, prefix: Sequence[int], drafters: set[str | None]) -> bool:
        """Whether the engines of these drafters have rows of the prefix."""
        return all(engine.has_prefix(prefix) for engine in self._of(drafters))

    def begin(self, prefix: Sequence[int], drafters: set[str | None]) -> None:
        """A run begins in which branches ask these drafters, or none."""
        self._prefix = list(prefix)
        self._active = self._of(drafters)
        for engine in self._active:
            engine.begin(prefix)

    def _of(self, drafters: set[str | None]) -> list[EngineBranches]:
        asked = {name for drafter in drafters for name in (drafter, self._otherwise(drafter))}
        return [engine for name, engine in self._engines.items() if name in asked]

    def _otherwise(self, drafter: str | None) -> str | None:
        settings = self._settings.get(drafter or "")
        return settings.otherwise if isinstance(settings, NgramDrafter) else None

    def follow_prefix(self, first: int, rows: int) -> None:
        """A pass has given `rows` tokens of the prefix rows, from `first` on."""
        for engine in self._active:
            engine.follow_prefix(first, rows)

    def add(self, branch: Branch, drafter: str | None) -> Asking:
        """What drafts for a new branch, if anything does."""
        settings, tokens = self._settings.get(drafter or ""), [*self._prefix, *branch.tokens]
        if isinstance(settings, NgramDrafter):
            asking = Asking(branch, tokens, make_host_drafter(settings), settings.otherwise, settings.least)
        elif isinstance(settings, GraphDrafter):
            asking = Asking(branch, tokens, engine=settings.name)
        else:
            return Asking(branch, tokens)
        if asking.engine is not None:
            self._engines[asking.engine].add(branch)
        return asking

    def draft(self, asking: Sequence[tuple[Asking, int]]) -> dict[int, Draft]:
        """Drafts by branch number, of at most as many nodes as each may use, and the pass verifies."""
        chains: dict[int, tuple[HostDrafter, int]] = {}
        wanting: dict[str, list[Branch]] = {}
        for each, limit in asking:
            branch = each.branch
            if limit <= 0 or len(branch.pending) != 1:  # its beginning is not computed yet
                continue
            if each.host is not None:
                limit = min(limit, each.reach, self._nodes)
                foreseen = each.host.foresee(each.tokens, limit)
                if foreseen >= min(each.least, limit) or each.engine is None:
                    chains[branch.number] = each.host, foreseen
                    continue
            if each.engine is not None:
                wanting.setdefault(each.engine, []).append(branch)
        trees: dict[int, Tree] = {}
        for engine in self._active:
            trees |= engine.draft(wanting.get(engine.name, []))
        nodes = [
            (score, -place, number)
            for number, tree in trees.items()
            for place, score in enumerate(tree.score)
            if score >= _WORTH
        ]
        wanted = {number: foreseen for number, (_, foreseen) in chains.items()} | dict.fromkeys(trees, 0)
        for _, _, number in nodes:
            wanted[number] += 1
        shares = divide(self._nodes - len(asking), wanted)
        drafts = {number: self._chain_of(host, shares[number]) for number, (host, _) in chains.items()}
        for each, _ in asking:
            each.drafted = len(drafts.get(each.branch.number, ()))
        together = sum(shares[number] for number in trees)
        chosen: dict[int, list[int]] = {number: [] for number in trees}
        for _, place, number in nlargest(together, nodes):
            chosen[number].append(-place)
        return drafts | {number: trees[number].of(sorted(places)) for number, places in chosen.items()}

    def _chain_of(self, host: HostDrafter, limit: int) -> Draft:
        token_ids, parent = self._chain
        count = host.draft(limit, token_ids, parent, 0) if limit else 0
        return Draft(token_ids[1 : 1 + count].tolist(), (parent[1 : 1 + count] - 1).tolist())

    def follow(self, asking: Asking, first: int, rows: NDArray[np.int64]) -> None:
        """A pass has given the branch rows, from its own token `first` on: the step's tokens `rows`."""
        if asking.drafted and asking.host is not None:
            accepted = len(rows) - 1  # what is rejected costs a pass that many share more than it brings
            asking.reach = 2 * asking.reach if accepted == asking.drafted else accepted + 2
        if asking.engine is not None:
            self._engines[asking.engine].follow(asking.branch, first, rows)

    def finish(self, asking: Asking) -> None:
        """The branch is no more."""
        if asking.engine is not None:
            self._engines[asking.engine].finish(asking.branch)


def divide(budget: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Shares of a budget: what is wanted, or where that is too much, as even as can be."""
    shares = {}
    left = max(0, budget)
    for rest, (who, want) in zip(
        range(len(wanted), 0, -1), sorted(wanted.items(), key=lambda item: item[1]), strict=True
    ):
        shares[who] = min(want, left // rest)
        left -= shares[who]
    return shares
