"""A drafter with an engine for all branches that ask it: one arena, and one pass for all of their trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Geometry, GraphDrafter
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import DraftStep
from runtime.kv.arena_rows import ArenaRows
from runtime.kv.branch_arena import BranchArena
from runtime.kv.branches import Branch, Draft
from runtime.stats import Stopwatch


@dataclass(frozen=True)
class Tree:
    """A tree behind a tip, its nodes in the engine's order: ancestors first. `parent` -1 is the tip."""

    token_ids: NDArray[np.int64]
    parent: NDArray[np.int64]
    score: list[float]  # log-probability summed from the tip, no more than the parent's

    def of(self, nodes: Sequence[int]) -> Draft:
        """The draft of some nodes, ascending, with whom all of their ancestors are."""
        place = {-1: -1} | {node: index for index, node in enumerate(nodes)}
        return Draft([int(self.token_ids[node]) for node in nodes], [place[int(self.parent[node])] for node in nodes])


class EngineBranches:
    """Row j of a branch is its own token j (`model`), or the pair of the feature before it and that token (`eagle3`).

    So a row of either can be fed once the target has the row before. The feature of the prefix's last token crosses
    into every branch: it is kept behind those of the target's steps. What levels append is dropped by length.
    """

    def __init__(
        self,
        settings: GraphDrafter,
        geometry: Geometry,
        buffers: Buffers,
        step: DraftStep,
        extend: Program,
        draft: Program,
        compact: Program,
        rows: int,
        watch: Stopwatch,
    ) -> None:
        """`watch` has the time that the bookkeeping of slots takes."""
        self.name = settings.name
        self.arena = BranchArena(settings.name, buffers, step, compact, rows)
        self._buffers, self._step, self._extend, self._draft = buffers, step, extend, draft
        self._watch = watch
        self._paired, self._nodes = settings.kind == "eagle3", settings.tree.nodes
        self._most_tips = 1 if rows > 1 else geometry.branches
        self._token_ids = buffers.of(settings.name, names.TREE_TOKEN_IDS).reshape(-1, self._nodes)
        self._parent = buffers.of(settings.name, names.TREE_PARENT).reshape(-1, self._nodes)
        self._score = buffers.of(settings.name, names.TREE_SCORE).reshape(-1, self._nodes)
        self._tip_position = buffers.of(settings.name, names.TIP_POSITION)
        self._feature_rows = buffers.of(settings.name, names.FEATURE_ROWS) if self._paired else None
        self._kept_feature = len(buffers.of(names.TARGET, names.FEATURES)) - 1 if self._paired else 0
        self._prefix: list[int] = []
        self._followed = 0  # tokens of the prefix that `follow_prefix` has seen
        self._live: dict[int, Branch] = {}
        self._rows: dict[int, int] = {}  # that each branch has here, by number
        self._known: dict[int, tuple[int, NDArray[np.int64]]] = {}  # features of its own tokens from one on: where

    def has_prefix(self, prefix: Sequence[int]) -> bool:
        """Whether all that can be known of the prefix has rows here."""
        return self._prefix == list(prefix) and self._followed == len(self._prefix)

    def reset(self) -> None:
        """Forget everything."""
        self.arena.reset()
        self._prefix, self._followed = [], 0
        self._live, self._rows, self._known = {}, {}, {}

    def begin(self, prefix: Sequence[int]) -> None:
        """A run of branches behind `prefix` begins; where its rows are there, `follow_prefix` will not be called."""
        if self.has_prefix(prefix):
            self.arena.rewind()
            self._live, self._rows, self._known = {}, {}, {}
        else:
            self.reset()
            self._prefix = list(prefix)

    def follow_prefix(self, first: int, rows: int) -> None:
        """A pass has given `rows` tokens of the prefix rows, from `first` on: take them in."""
        end = first + rows
        if self._paired and end == len(self._prefix):
            feature = names.TARGET, names.FEATURES
            self._buffers.copy_row((*feature, rows - 1), (*feature, self._kept_feature))
        lead = int(self._paired)
        tokens = self._prefix[first + lead : end + lead]
        most = self._step.most
        for start in range(0, len(tokens), most):
            part = tokens[start : start + most]
            self.arena.begin({})
            if self._feature_rows is not None:
                self._feature_rows[: len(part)] = np.arange(start, start + len(part))
            self.arena.append(part, first + start, 0)
            self._extend.run()
            self.arena.commit_prefix(len(part))
        self._followed = end

    def add(self, branch: Branch) -> None:
        """A branch that asks this drafter begins."""
        self.arena.open(branch.number)
        self._live[branch.number] = branch
        self._rows[branch.number] = int(self._paired and not self._prefix)  # nothing stands before its first token

    @property
    def paired(self) -> bool:
        """Whether its rows are of pairs, the first of the second token."""
        return self._paired

    def known(self, branch: Branch) -> int:
        """Leading tokens of a live branch that have rows here, as far as they can."""
        return self._rows[branch.number]

    def rows_of(self, branch: Branch) -> ArenaRows:
        """Its rows by its tokens, where there is no prefix."""
        return self.arena.rows_of(branch.number, int(self._paired))

    def restore(self, branch: Branch, known: int) -> None:
        """A branch that has just been added, behind no prefix, takes rows of so many leading tokens; see `rows_of`."""
        if known > self._paired:
            self.arena.restore(branch.number, known - self._paired)
            self._rows[branch.number] = known

    def restore_prefix(self, tokens: int) -> ArenaRows:
        """The prefix begins with so many tokens that need not be followed; their rows, where they are to be."""
        self._followed = tokens
        return self.arena.restore_prefix(tokens, int(self._paired))

    def prefix_rows(self) -> ArenaRows:
        """Rows of the prefix by its tokens."""
        return self.arena.prefix_rows(int(self._paired))

    def follow(self, branch: Branch, first: int, rows: NDArray[np.int64]) -> None:
        """A pass has given the branch rows, from its own token `first` on: the step's tokens `rows`."""
        self._known[branch.number] = first, rows

    def finish(self, branch: Branch) -> None:
        """The branch is no more."""
        self.arena.close(branch.number)
        for table in (self._live, self._rows, self._known):
            table.pop(branch.number, None)

    def draft(self, wanting: Sequence[Branch]) -> dict[int, Tree]:
        """Trees by branch number, behind the tips of those branches.

        A head takes in what all branches have committed, whoever drafts: features are gone after the next pass.
        """
        if not self._live or not (wanting or self._paired):
            return {}
        tips = {branch.number for branch in wanting}
        room = self._step.most + self._step.reach_of(self._most_tips)
        waiting = [self._live[number] for number in sorted(self._live)]
        grown: list[tuple[int, int, int]] = []
        while True:
            with self._watch:
                self.arena.make_room(room)
                self.arena.begin({branch.number: 0 for branch in waiting})  # it is ragged, whatever they come to
                self._step.expect_tips(self._most_tips)
                grown = self._lay_out(waiting, tips)
            if not waiting:
                break
            self._run(self._extend)
        if not self._step.new_tokens:
            return {}
        if not grown:
            self._run(self._extend)
            return {}
        self._step.grow(grown)
        self._run(self._draft)
        return self._read(grown)

    def _run(self, program: Program) -> None:
        program.run()
        with self._watch:
            self.arena.commit()

    def _lay_out(self, waiting: list[Branch], tips: set[int]) -> list[tuple[int, int, int]]:
        """Lay out what branches lack, as many of them as there is room for; they are `waiting` no more.

        Returns the tips that trees grow from: row, index in the step, branch.
        """
        step, grown = self._step, []
        while waiting:
            branch = waiting[0]
            number, have = branch.number, self._rows[branch.number]
            end = min(branch.rows + 1 if self._paired else len(branch.tokens), len(branch.tokens))
            count = min(end - have, step.most - step.new_tokens)
            if count > 0:
                if self._feature_rows is not None:
                    n = step.new_tokens
                    self._feature_rows[n : n + count] = self._features(number, have, count)
                position = len(self._prefix) + have - self._paired
                last = self.arena.append(branch.tokens[have : have + count], position, number)
                self._rows[number] = have + count
                if number in tips and have + count == len(branch.tokens):
                    grown.append((self.arena.row_of(number), last, number))
                    self._tip_position[number] = len(self._prefix) + have + count - 1
            if have + count < end:
                break
            waiting.pop(0)
        return grown

    def _features(self, number: int, first: int, count: int) -> list[int]:
        """Where the features of the pairs `first` and on lie: that of the token before each."""
        start, rows = self._known.get(number, (0, np.zeros(0, np.int64)))
        return [
            self._kept_feature if pair == 0 else int(rows[pair - 1 - start]) for pair in range(first, first + count)
        ]

    def _read(self, grown: Sequence[tuple[int, int, int]]) -> dict[int, Tree]:
        trees, place, row = {}, 0, -1
        each = self._step.tips
        for at, _, number in grown:
            place = place + 1 if at == row else 0
            row = at
            tree = row * each + place
            trees[number] = Tree(
                self._token_ids[tree, 1:].copy(), self._parent[tree, 1:] - 1, self._score[tree, 1:].tolist()
            )
        return trees
