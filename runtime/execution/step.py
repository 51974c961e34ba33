"""The step of one model that is being prepared in its buffers: new tokens, and the sizes that go with them.

The leading entries of the step's buffers are the step; `sizes` says how many lead. A sequence has one row. Branches
may have one between them, or one each: their tokens are laid out row by row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.manifest import BatchSize, Buckets, Geometry, GraphDrafter
from outrider.plans.sampling import NOBODY
from outrider.runtime.execution.buffers import Buffers

_NEW, _VIEW, _LOGITS, _ROWS, _EDGES, _PLACES, _FEATURED, _TIPS, _GROWN = range(len(names.SYMBOLS))
_HIDDEN = np.finfo(np.float32).min  # what BimMask writes: finite, so that no softmax is over nothing


class Step:
    """New tokens, a chain whose last is the tip, or chains of branches. `reach` more keys of each row come into view:
    those a draft's levels append."""

    def __init__(
        self,
        model: str,
        buffers: Buffers,
        geometry: Geometry,
        limits: Mapping[str, int],
        buckets: Buckets | None = None,
    ) -> None:
        self.sizes = [0] * len(names.SYMBOLS)  # in the order of names.SYMBOLS; stages hold on to this very list
        self.sizes[_ROWS], self.sizes[_EDGES], self.sizes[_FEATURED] = 1, 2, limits[names.FEATURED]
        self.largest_view, self.reach, self.buckets = limits[names.VIEW], 0, buckets
        self._capacity = self._slots = geometry.capacity  # of the KV cache that the step appends to
        self._views = buckets.view if buckets else range(geometry.view_bucket, self.largest_view, geometry.view_bucket)
        self.token_ids = buffers.array(model, names.TOKEN_IDS)
        self.positions = buffers.array(model, names.POSITIONS)
        self.branch = buffers.array(model, names.BRANCH)
        self.parent = buffers.array(model, names.PARENT)
        self.row_splits = buffers.array(model, names.ROW_SPLITS)
        self.past_length = buffers.array(model, names.PAST_LENGTH)
        self.most, self.most_rows = len(self.token_ids), len(self.past_length)
        self._count = np.arange(self.most + 1)  # ready-made chains: parents, and offsets of positions
        self._row = 0  # the row that new tokens go to

    def begin(self, past: int, position: int, tokens: list[int], branch: int, slots: int | None = None) -> None:
        """Lay out `tokens` as a chain of one row after `past` slots, the first at `position`.

        `slots`: the size of another KV cache than the model's own, of which no view is larger.
        """
        n = len(tokens)
        self._slots = slots or self._capacity
        self.past_length[0] = past
        self._row, self.sizes[_ROWS], self.sizes[_EDGES] = 0, 1, 2
        if n == 1:  # the decoding hot path: scalar stores cost a tenth of slice stores
            self.token_ids[0] = tokens[0]
            self.positions[0] = position
            self.parent[0] = -1
            self.branch[0] = branch
        else:
            self.token_ids[:n] = tokens
            self.positions[:n] = self._count[:n]
            self.positions[:n] += position
            self.parent[:n] = self._count[:n]
            self.parent[:n] -= 1
            self.branch[:n] = branch
        self._resize(n)

    def begin_rows(self, past: Sequence[int], slots: int | None = None) -> None:
        """Begin an empty step after `past` slots of each row of the cache, for `append_chain`; `slots` as in
        `begin`."""
        rows = len(past)
        self._slots = slots or self._capacity
        self.past_length[:rows] = past
        self.row_splits[: rows + 1] = 0
        self._row = 0
        self.sizes[_ROWS], self.sizes[_EDGES] = rows, rows + 1
        self.sizes[_NEW] = self.sizes[_PLACES] = 0
        self.sizes[_VIEW] = self.view_of(max(past))

    def append_chain(self, tokens: Sequence[int], position: int, branch: int, row: int = 0) -> int:
        """Lay out the next tokens of a branch, the first at `position`; return the index of the last one in the step.

        Rows come in ascending order.
        """
        n, count = self.sizes[_NEW], len(tokens)
        last = n + count - 1
        self.token_ids[n : last + 1] = tokens
        self.positions[n : last + 1] = self._count[:count]
        self.positions[n : last + 1] += position
        self.parent[n] = -1
        self.parent[n + 1 : last + 1] = self._count[n:last]
        self.branch[n : last + 1] = branch
        self._row = row
        self._resize(last + 1)
        return last

    def batch_size(self, sequences: int, tokens: int, each: int) -> BatchSize | None:
        """Return the recorded size of a step of several sequences, of `tokens` in all and at most `each` of one; None
        where there is none."""
        sizes = () if self.buckets is None else self.buckets.batch
        return next((s for s in sizes if sequences <= s.sequences and tokens <= s.tokens and each <= s.each), None)

    def begin_warmup_batch(self, size: BatchSize, view: int, *, rows: bool) -> None:
        """Begin a step of a recorded size in which no sequence takes part, with `view` keys in view or the next number
        that there is, in a row each or all in one."""
        count = min(size.sequences, self.most_rows) if rows else 1
        most = -(-size.tokens // count)
        self.begin_rows(count * [max(0, view - self.reach - most)])
        for row in range(count):
            self.append_filling(min(most, size.tokens - self.sizes[_NEW]), row)
        self.end_batch(size)

    def end_batch(self, size: BatchSize) -> None:
        """End a step that has been filled up to a recorded size."""
        assert self.sizes[_NEW] == size.tokens, "a step that is not full"
        if self.sizes[_ROWS] > 1:
            self.sizes[_PLACES] = size.each

    def append_filling(self, count: int, row: int) -> None:
        """Lay out padding tokens that fill a step up to a recorded size."""
        if count:
            self.append_padding(count, row)

    def append_padding(self, count: int, row: int) -> None:
        """Lay out padding tokens, which see and are seen by none but themselves."""
        n = self.sizes[_NEW]
        assert n + count <= self.most, "a rectangle larger than a step"
        for column, value in ((self.token_ids, 0), (self.positions, 0), (self.parent, -1), (self.branch, NOBODY)):
            column[n : n + count] = value
        self._row = row
        self._resize(n + count)

    def begin_moves(self, start: int, count: int, row: int = 0) -> None:
        """Take `count` slots of a row from `start` on for the new tokens: for an op that moves some of them."""
        self.past_length[row] = start
        self.row_splits[: row + 1] = 0
        self.row_splits[row + 1] = count
        self.sizes[_ROWS], self.sizes[_EDGES] = row + 1, row + 2

    @property
    def new_tokens(self) -> int:
        return self.sizes[_NEW]

    def _resize(self, new: int) -> None:
        """Set the sizes that follow from `new` tokens. The view is rounded up, so that it changes rarely."""
        rows, row = self.sizes[_ROWS], self._row
        if rows == 1:
            self.row_splits[1] = self.sizes[_NEW] = self.sizes[_PLACES] = new
            self.sizes[_VIEW] = self.view_of(int(self.past_length[0]) + new)
            return
        self.row_splits[row + 1 : rows + 1] = self.sizes[_NEW] = new
        mine = new - int(self.row_splits[row])
        self.sizes[_PLACES] = max(self.sizes[_PLACES], mine)
        self.sizes[_VIEW] = max(self.sizes[_VIEW], self.view_of(int(self.past_length[row]) + mine))

    def view_of(self, slots: int) -> int:
        """Return the number of keys in view of a step after which `slots` are in use, those of a draft's levels not
        counted.
        """
        index = bisect_left(self._views, slots + self.reach)
        view = self._views[index] if index < len(self._views) else self.largest_view
        return view if view <= self._slots else self._slots


class DraftStep(Step):
    """New tokens of a drafter's engine, after some of which trees grow."""

    def __init__(
        self,
        drafter: GraphDrafter,
        buffers: Buffers,
        geometry: Geometry,
        limits: Mapping[str, int],
        buckets: Buckets | None = None,
    ) -> None:
        super().__init__(drafter.name, buffers, geometry, limits, buckets)
        self._nodes, self._grown = drafter.tree.nodes, drafter.grown
        self.reach = self._grown
        self.sizes[_TIPS], self.sizes[_GROWN] = 1, self._nodes
        self._tips: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        if geometry.branches > 1:
            rows, branches = (buffers.array(drafter.name, name) for name in (names.TIP_INDICES, names.TIP_BRANCH))
            self._tips = rows.reshape(-1), branches.reshape(-1)

    def begin(self, past: int, position: int, tokens: list[int], branch: int, slots: int | None = None) -> None:
        """Begin as any step does; a tree grows from the last token."""
        self.reach = self._grown
        super().begin(past, position, tokens, branch, slots)
        if self._tips is not None:
            self.sizes[_TIPS], self.sizes[_GROWN] = 1, self._nodes
            self._tips[0][0], self._tips[1][0] = len(tokens) - 1, branch

    def begin_rows(self, past: Sequence[int], slots: int | None = None) -> None:
        super().begin_rows(past, slots)
        self.grow(())

    def begin_grown(self, past: int) -> None:
        """Take the slots that a draft's levels have filled after `past` for new tokens: for an op that moves them."""
        self._row, self.sizes[_ROWS], self.sizes[_EDGES] = 0, 1, 2
        self.past_length[0] = past
        self.row_splits[1] = self.reach

    @property
    def tips(self) -> int:
        """Number of trees of each row."""
        return self.sizes[_TIPS]

    def reach_of(self, tips: int) -> int:
        """Return the number of slots that the levels of `tips` trees fill."""
        return self._grown * tips

    def expect_tips(self, most: int) -> None:
        """At most `most` trees will grow in each row of the step that begins next."""
        self.reach = self.reach_of(most)

    def grow(self, tips: Sequence[tuple[int, int, int]], least: int = 1) -> None:
        """Set the tips `(row, index, branch)`, row by row, that trees grow from, at least `least` in each row; a row
        with fewer tips than others grows trees that nobody reads.
        """
        if self._tips is None:  # a plan of one branch: the tip is the last token
            return
        rows = self.sizes[_ROWS]
        each = max(least, *(sum(tip[0] == row for tip in tips) for row in range(rows)))
        at, of = (column[: rows * each].reshape(rows, each) for column in self._tips)
        at[:] = of[:] = 0
        place = [0] * rows
        for row, index, branch in tips:
            at[row, place[row]], of[row, place[row]] = index, branch
            place[row] += 1
        self.sizes[_TIPS], self.sizes[_GROWN] = each, rows * each * self._nodes


class TargetStep(Step):
    """New tokens: first the pending ones, a chain whose last is the tip, then drafted nodes."""

    def __init__(
        self, buffers: Buffers, geometry: Geometry, limits: Mapping[str, int], buckets: Buckets | None = None
    ) -> None:
        super().__init__(names.TARGET, buffers, geometry, limits, buckets)
        self.max_nodes = limits[names.LOGITS] - 1
        self.drafted = 0  # nodes of the draft after the tip; what fills a bucket is not among them
        self.logit_indices = buffers.array(names.TARGET, names.LOGIT_INDICES)
        self._attn_bias = buffers.array(names.TARGET, names.ATTN_BIAS).reshape(-1)
        self._free_bias = buffers.array(names.TARGET, names.FREE_BIAS)

    def begin(self, past: int, position: int, tokens: list[int], branch: int, slots: int | None = None) -> None:
        """Begin as any step does, without logits (`append_tip`) and without a draft (`append_nodes`, `expect_tree`)."""
        self.drafted = self._free_bias[0] = self.sizes[_LOGITS] = 0
        super().begin(past, position, tokens, branch, slots)

    def begin_rows(self, past: Sequence[int], slots: int | None = None) -> None:
        super().begin_rows(past, slots)
        self.drafted = self._free_bias[0] = self.sizes[_LOGITS] = 0

    @property
    def asked(self) -> int:
        """Number of tokens whose logits are asked for."""
        return self.sizes[_LOGITS]

    def append_filling(self, count: int, row: int) -> None:
        """Lay out padding tokens with logits, from which nothing is chosen."""
        super().append_filling(count, row)
        n, logits = self.sizes[_NEW], self.sizes[_LOGITS]
        self.logit_indices[logits : logits + count] = self._count[n - count : n]
        self.sizes[_LOGITS] += count

    def append_tip(self, index: int) -> None:
        """Ask for the logits of the last token of a chain that was appended; nodes may follow."""
        self.logit_indices[self.sizes[_LOGITS]] = index
        self.sizes[_LOGITS] += 1

    def begin_warmup(self, length: int, drafted: int = 0) -> None:
        """Begin a step of tokens 0: the tip, the last of `length` tokens, and a chain of `drafted` nodes."""
        self.begin(length - 1, length - 1, [0], 0)
        self.append_tip(0)
        if drafted:
            self.token_ids[1 : 1 + drafted] = 0
            self.parent[1 : 1 + drafted] = self._count[:drafted]
            self.append_nodes(drafted)

    def append_nodes(self, count: int) -> None:
        """Complete `count` drafted nodes whose tokens and parents a drafter wrote after the tip."""
        n, logits = self.sizes[_NEW], self.sizes[_LOGITS]
        end = n + count
        parents: list[int] = self.parent[n:end].tolist()
        tip = parents[0]
        if parents == list(range(n - 1, end - 1)):  # a chain
            self.positions[n:end] = self._count[1 : 1 + count]
            self.positions[n:end] += self.positions[tip]
        else:
            positions = {tip: int(self.positions[tip])}
            for node, parent in enumerate(parents, n):
                positions[node] = positions[parent] + 1
            self.positions[n:end] = list(positions.values())[1:]
        self.branch[n:end] = self.branch[tip]
        self.logit_indices[logits : logits + count] = self._count[n:end]
        self.drafted += count
        self.sizes[_LOGITS] += count
        self._resize(end)

    def fill_bucket(self) -> None:
        """Pad the step to the next recorded size with copies of the draft's first node, which comes before them and is
        found first.

        A step that also catches up keeps its size, and so does one that would not fit.
        """
        n = self.sizes[_NEW]
        if self.buckets is None or not self.drafted or n != 1 + self.drafted:
            return
        index = bisect_left(self.buckets.new, n)
        size = self.buckets.new[index] if index < len(self.buckets.new) else n
        if size > 1 + self.max_nodes or int(self.past_length[0]) + size > self.largest_view:
            return
        for column in (self.token_ids, self.parent, self.positions, self.branch):
            column[n:size] = column[1]
        self.logit_indices[n:size] = self._count[n:size]
        self.sizes[_LOGITS] = size
        self._resize(size)

    def expect_tree(self, nodes: int) -> None:
        """Make room for a tree of `nodes` whose root is the only new token: tokens, positions and parents of all
        of them come from the drafter's engine, the first stage of the program."""
        self.branch[1:nodes] = self.branch[0]
        self.logit_indices[:nodes] = self._count[:nodes]
        self.drafted = nodes - 1
        self.sizes[_LOGITS] = nodes
        self._resize(nodes)

    def keep_front(self, drafted: int) -> None:
        """Keep the first `drafted` nodes after the root of a tree that an engine has written."""
        self.drafted = drafted
        self.sizes[_LOGITS] = 1 + drafted
        self._resize(1 + drafted)

    def keep_nodes(self, nodes: NDArray[np.int64], parent: Sequence[int]) -> None:
        """Keep some nodes of a tree that an engine has written, ascending, with their ancestors; the root is node 0.

        `parent` counts the nodes that are kept, -1 for the root.
        """
        count = 1 + len(nodes)
        for column in (self.token_ids, self.positions):
            column[1:count] = column[nodes]
        self.parent[1:count] = parent
        self.parent[1:count] += 1
        self.keep_front(len(nodes))

    @property
    def bias_elements(self) -> int:
        """Number of elements of `attn_bias` that `begin_beams` has written."""
        return self.sizes[_NEW] * self.sizes[_VIEW]

    def begin_beams(self, past: int, position: int, tokens: list[int], visible: NDArray[np.bool_]) -> None:
        """Lay out `tokens` at one `position`, each with logits, after `past` slots, and write the bias they run under.

        `visible` bool [tokens, K] says which of the last K keys each token sees, its own included; keys before those
        are seen by all.
        """
        n, keys = len(tokens), past + len(tokens)
        self.drafted = 0
        self._slots = self._capacity
        self._free_bias[0] = 1
        self.past_length[0] = past
        self._row, self.sizes[_ROWS], self.sizes[_EDGES] = 0, 1, 2
        self.token_ids[:n] = tokens
        self.positions[:n] = position
        self.logit_indices[:n] = self._count[:n]
        self.sizes[_LOGITS] = n
        self._resize(n)
        view = self.sizes[_VIEW]
        bias = self._attn_bias[: n * view].reshape(n, view)
        bias.fill(_HIDDEN)
        first = keys - visible.shape[1]
        bias[:, :first] = 0.0
        bias[:, first:keys][visible] = 0.0
