"""The branches of one run: who lives, what each has said, and how a step of all of them is laid out.

The prefix is seen by all; a branch sees it and its own rows (DESIGN section 6, FEATURES row 2). Positions of every
branch count on from the prefix. How rows lie in memory is the arena's business: calls are the same in both modes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.execution.step import TargetStep
from runtime.kv.branch_arena import BranchArena


@dataclass
class Branch:
    """One live continuation. `tokens` are its own, behind the prefix; those from `rows` on have no rows yet."""

    number: int
    tokens: list[int]
    end: int  # most tokens of its own
    rows: int = 0
    root: int = field(default=-1, init=False)  # the step's index of its tip, -1 where the step does not have it

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.rows :]


@dataclass(frozen=True)
class Draft:
    """Nodes behind a tip, ancestors first: `parent[i]` is the node that node i hangs from, -1 for the tip."""

    token_ids: Sequence[int]
    parent: Sequence[int]

    def __len__(self) -> int:
        return len(self.token_ids)


NOTHING = Draft((), ())


class BranchState:
    """Live branches by number (0 to the plan's branches - 1), over the target's arena.

    A step: `prepare_inputs`, the pass, and `commit`.
    """

    def __init__(self, arena: BranchArena, step: TargetStep, numbers: int) -> None:
        self._arena, self._step = arena, step
        self._free = list(range(numbers - 1, -1, -1))
        self.live: dict[int, Branch] = {}
        self.prefix: list[int] = []
        self._prefilled = 0

    def reset(self) -> None:
        """Forget everything."""
        self._arena.reset()
        self._free = sorted([*self._free, *self.live], reverse=True)
        self.live.clear()
        self.prefix, self._prefilled = [], 0

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        """Whether these are the prefix, and have rows."""
        return self.prefix == list(tokens) and self._prefilled == len(self.prefix)

    def rewind(self) -> None:
        """Forget all but the prefix."""
        self._arena.rewind()
        self._free = sorted([*self._free, *self.live], reverse=True)
        self.live.clear()

    def init_prefix(self, tokens: Sequence[int]) -> None:
        """Begin with what all branches share, whose rows `commit_prefix` takes as they come."""
        self.reset()
        self.prefix = list(tokens)

    def restore_prefix(self, rows: int) -> None:
        """The prefix's first rows are there already."""
        self._prefilled = rows

    def prepare_prefix(self, most: int) -> int:
        """Lay out at most `most` of the prefix's tokens that lack rows; how many."""
        tokens = self.prefix[self._prefilled : self._prefilled + most]
        if tokens:
            self._arena.begin({})
            self._arena.append(tokens, self._prefilled, 0)
        return len(tokens)

    def commit_prefix(self, rows: int) -> int:
        """The step's tokens have rows now; the index of the first one in the prefix."""
        first = self._prefilled
        self._arena.commit_prefix(rows)
        self._prefilled += rows
        return first

    def fits(self, end: int, chunk: int) -> bool:
        """Whether there is a number and room for one more branch of at most `end` tokens, whatever the others say.

        `chunk` is that of `prepare_inputs`. Capacity is reserved: where a branch ends never depends on its neighbours.
        Drafts take what is left.
        """
        ends = [end, *(branch.end for branch in self.live.values())]
        return bool(self._free) and self._arena.holds(ends, chunk)

    @property
    def free(self) -> Sequence[int]:
        """Numbers that no branch has."""
        return self._free

    def add_branch(self, tokens: Sequence[int], end: int, number: int | None = None) -> Branch:
        """A new branch that begins with `tokens` (one or more) and never has more than `end` of its own.

        It gets `number`, one that is free, or the lowest.
        """
        number = self._free[-1] if number is None else number
        self._free.remove(number)
        branch = Branch(number, list(tokens), end)
        self.live[branch.number] = branch
        self._arena.open(branch.number)
        return branch

    def finish(self, branch: Branch) -> None:
        """The branch is no more; its slots can be used again."""
        del self.live[branch.number]
        self._free.append(branch.number)
        self._free.sort(reverse=True)
        self._arena.close(branch.number)

    def prepare_inputs(self, drafts: Mapping[int, Draft], chunk: int) -> list[tuple[Branch, int]]:
        """Lay out a step of every live branch: what it lacks rows of, and the nodes drafted for it by its number.

        At most `chunk` tokens of beginnings go in, and at least one of each branch: who came first, goes first. Returns
        the branches in order, and how many nodes each has: as many as were drafted, or as there is room for.
        """
        fed: dict[int, int] = {}
        width = self._arena.width(self.live)
        for number, branch in self.live.items():
            fed[number] = min(len(branch.pending), chunk, width)
            chunk = max(1, chunk - fed[number] + 1)
        chains = {number: fed[number] for number in sorted(fed)}
        self._arena.make_room(sum(chains.values()) + sum(map(len, drafts.values())))
        whole = [number for number, count in chains.items() if count == len(self.live[number].pending)]
        nodes = self._arena.fit(chains, {number: len(drafts.get(number, NOTHING)) for number in whole})
        self._arena.begin({number: count + nodes.get(number, 0) for number, count in chains.items()})
        laid_out = []
        for number, count in chains.items():
            branch = self.live[number]
            self._feed(branch, count)
            drafted = self._hang(branch, drafts[number], nodes[number]) if nodes.get(number) else 0
            self._arena.close_row(number)
            laid_out.append((branch, drafted))
        return laid_out

    def _feed(self, branch: Branch, count: int) -> None:
        """Lay out the first `count` of the tokens that the branch lacks rows of.

        Where that is all of them, the last one is its tip, whose logits are asked for: a draft may hang behind it.
        """
        tokens = branch.tokens[branch.rows : branch.rows + count]
        last = self._arena.append(tokens, len(self.prefix) + branch.rows, branch.number)
        branch.root = -1
        if branch.rows + count == len(branch.tokens):
            branch.root = last
            self._step.append_tip(last)

    def _hang(self, branch: Branch, draft: Draft, count: int) -> int:
        first = branch.root + 1
        self._step.token_ids[first : first + count] = draft.token_ids[:count]
        self._step.parent[first : first + count] = draft.parent[:count]
        self._step.parent[first : first + count] += first
        self._step.append_nodes(count)
        return count

    def commit(self, branches: Sequence[tuple[Branch, int]], kept: NDArray[np.int64]) -> None:
        """Take the rows that a pass has left of each branch of the step: so many of them stand for its tokens.

        `kept` lists the step's tokens whose rows stay, which have been moved together. A branch that has more of them
        than tokens, as a stop string or the like cut it off, is over.
        """
        self._arena.commit(kept)
        for branch, rows in branches:
            branch.rows += rows
