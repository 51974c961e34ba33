"""The branches of one run: who lives, what each has said, and which slots of the arena are whose.

In one sequence: rows of all branches share one arena, interleaved as they came. The prefix is there once and is seen
by all; a branch sees it and its own rows (DESIGN section 6, FEATURES row 2). Positions of every branch count on from
the prefix. What a finished branch leaves are dead slots, which nothing sees; live rows are moved over them when room
runs short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.arena import EMPTY, SHARED, SlotMap
from runtime.step import TargetStep


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


class BranchState:
    """Live branches by number (0 to the plan's branches - 1), over the slot map of the target's arena.

    A step: `begin`, then for every branch `feed` and as many drafted nodes as the caller hangs behind its tip, the
    pass, and `commit`.
    """

    def __init__(self, slots: SlotMap, step: TargetStep, numbers: int) -> None:
        self._slots, self._step = slots, step
        self._free = list(range(numbers - 1, -1, -1))
        self._live: dict[int, Branch] = {}
        self._reserved = 0
        self.prefix: list[int] = []
        self.dead = 0

    @property
    def free(self) -> int:
        """How many more branches there may be."""
        return len(self._free)

    @property
    def unreserved(self) -> int:
        """Slots that no branch may come to need, dead ones included; one step's drafts are kept apart."""
        return self._step.largest_view - self._step.max_nodes - 1 - len(self.prefix) - self._reserved

    def reset(self) -> None:
        """Forget everything."""
        self._slots.truncate(0)
        for number in self._live:
            self._free.append(number)
        self._live.clear()
        self.prefix, self.dead, self._reserved = [], 0, 0

    def init_prefix(self, tokens: Sequence[int]) -> None:
        """Begin with what all branches share, whose rows `commit_prefix` takes as they come."""
        self.reset()
        self.prefix = list(tokens)

    @property
    def prefix_pending(self) -> list[int]:
        return self.prefix[self._slots.length :]

    def commit_prefix(self, rows: int) -> None:
        """The step's `rows` tokens were the next ones of the prefix."""
        self._slots.commit(rows, kept=None, owner=SHARED)

    def add_branch(self, tokens: Sequence[int], end: int) -> Branch:
        """A new branch that begins with `tokens` (one or more) and never has more than `end` of its own.

        Its slots are reserved: the caller has made sure that there are `end` unreserved ones, and a number free.
        """
        branch = Branch(self._free.pop(), list(tokens), end)
        self._live[branch.number] = branch
        self._reserved += end
        return branch

    def finish(self, branch: Branch) -> None:
        """The branch is no more; its slots are dead."""
        del self._live[branch.number]
        self._free.append(branch.number)
        self._reserved -= branch.end
        self.dead += self._slots.release(branch.number)

    def begin(self) -> None:
        """An empty step behind all rows."""
        self._step.begin_branches(self._slots.length)
        for branch in self._live.values():
            branch.root = -1

    def feed(self, branch: Branch, most: int) -> int:
        """Lay out at most `most` of the tokens that the branch lacks rows of; how many.

        Where that is all of them, the last one is its tip, whose logits are asked for: a draft may hang behind it.
        """
        tokens = branch.tokens[branch.rows : branch.rows + most]
        position = len(self.prefix) + branch.rows
        whole = branch.rows + len(tokens) == len(branch.tokens)
        last = self._step.append_chain(tokens, position, branch.number, tip=whole)
        branch.root = last if whole else -1
        return len(tokens)

    def commit(self, branches: Sequence[tuple[Branch, int]], kept: NDArray[np.int64]) -> None:
        """Take the rows that a pass has left of each branch of the step, in its order: so many of them.

        `kept` lists the step's tokens whose rows stay, which have been moved together; those behind a branch's number
        are dropped: what a stop string or the like cut off.
        """
        start = self._slots.length
        self._slots.commit(len(kept), kept)
        owner = self._step.branch[kept]
        for branch, rows in branches:
            mine = np.flatnonzero(owner == branch.number)
            branch.rows += rows
            if rows < len(mine):
                self.dead += self._slots.drop(start + mine[rows:])

    def moves(self, reach: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Live rows behind dead slots, ascending, in parts that lie within `reach` slots, and where each part goes."""
        alive = np.flatnonzero(self._slots.owners != EMPTY)
        to = int(np.argmax(alive != np.arange(len(alive)))) if len(alive) and alive[-1] >= len(alive) else len(alive)
        while to < len(alive):
            count = int(np.searchsorted(alive, alive[to] + reach)) - to
            yield to, alive[to : to + count]
            to += count

    def moved(self) -> None:
        """The live rows lie at the front now."""
        self._slots.compact()
        self.dead = 0
