"""The step of one model that is being prepared in its buffers: new tokens, and the sizes that go with them.

The leading entries of the step's buffers are the step; `sizes` says how many lead. One row for now: its
tokens are the step's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import Geometry
from runtime.buffers import Buffers

_NEW, _VIEW, _LOGITS, _ROWS, _EDGES, _PLACES, _FEATURED = range(len(names.SYMBOLS))
_HIDDEN = np.finfo(np.float32).min  # what BimMask writes: finite, so that no softmax is over nothing


class Step:
    """New tokens, a chain whose last is the tip. `reach` more keys come into view: those a draft's levels append."""

    def __init__(
        self, model: str, buffers: Buffers, geometry: Geometry, limits: Mapping[str, int], reach: int = 0
    ) -> None:
        self.sizes = [0] * len(names.SYMBOLS)  # in the order of names.SYMBOLS; stages hold on to this very list
        self.sizes[_ROWS], self.sizes[_EDGES], self.sizes[_FEATURED] = 1, 2, limits[names.FEATURED]
        self._bucket, self.largest_view, self._reach = geometry.view_bucket, limits[names.VIEW], reach
        self.token_ids = buffers.of(model, names.TOKEN_IDS)
        self.positions = buffers.of(model, names.POSITIONS)
        self.branch = buffers.of(model, names.BRANCH)
        self.parent = buffers.of(model, names.PARENT)
        self.row_splits = buffers.of(model, names.ROW_SPLITS)
        self.past_length = buffers.of(model, names.PAST_LENGTH)
        self.most = len(self.token_ids)
        self._count = np.arange(self.most + 1)  # ready-made chains: parents, and offsets of positions

    def begin(self, past: int, position: int, tokens: list[int], branch: int) -> None:
        """Lay out `tokens` as a chain behind `past` committed rows, the first at `position`."""
        n = len(tokens)
        self.past_length[0] = past
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

    def begin_grown(self, past: int) -> None:
        """Take the rows that a draft's levels have put behind `past` for the new tokens: for an op that moves them."""
        self.past_length[0] = past
        self.row_splits[1] = self._reach

    @property
    def new_tokens(self) -> int:
        return self.sizes[_NEW]

    def _resize(self, new: int) -> None:
        """Set the sizes that follow from `new` tokens. The view is rounded up, so that it changes rarely."""
        self.row_splits[1] = self.sizes[_NEW] = self.sizes[_PLACES] = new
        keys = int(self.past_length[0]) + new + self._reach
        self.sizes[_VIEW] = min(-(-keys // self._bucket) * self._bucket, self.largest_view)


class TargetStep(Step):
    """New tokens: first the pending ones, a chain whose last is the tip, then drafted nodes."""

    def __init__(self, buffers: Buffers, geometry: Geometry, limits: Mapping[str, int]) -> None:
        super().__init__(names.TARGET, buffers, geometry, limits)
        self.max_nodes = limits[names.LOGITS] - 1
        self.draft_limit = 0
        self.logit_rows = buffers.of(names.TARGET, names.LOGIT_ROWS)
        self._attn_bias = buffers.of(names.TARGET, names.ATTN_BIAS).reshape(-1)
        self._free_bias = buffers.of(names.TARGET, names.FREE_BIAS)

    def begin_target(self, past: int, position: int, tokens: list[int], branch: int, *, logits: bool) -> None:
        """As `begin`; `logits` asks for those of the last token, the tip.

        No draft follows unless `draft_limit` is raised, or `expect_tree` says that an engine writes one.
        """
        self.draft_limit = 0
        self._free_bias[0] = 0
        self.logit_rows[0] = len(tokens) - 1
        self.sizes[_LOGITS] = int(logits)
        self.begin(past, position, tokens, branch)

    def append_nodes(self, count: int) -> None:
        """Complete `count` drafted nodes whose tokens and parents a drafter wrote behind the tip."""
        n = self.sizes[_NEW]
        for node in range(n, n + count):
            parent = self.parent[node]
            self.positions[node] = self.positions[parent] + 1
            self.branch[node] = self.branch[parent]
            self.logit_rows[node - n + 1] = node
        self.sizes[_LOGITS] += count
        self._resize(n + count)

    def expect_tree(self, nodes: int) -> None:
        """Make room for a tree of `nodes` whose root is the only new token: tokens, positions and parents of all
        of them come from the drafter's engine, the first stage of the program."""
        self.branch[1:nodes] = self.branch[0]
        self.logit_rows[:nodes] = self._count[:nodes]
        self.sizes[_LOGITS] = nodes
        self._resize(nodes)

    @property
    def bias_elements(self) -> int:
        """Of `attn_bias`, that `begin_beams` has written."""
        return self.sizes[_NEW] * self.sizes[_VIEW]

    def begin_beams(self, past: int, position: int, tokens: list[int], visible: NDArray[np.bool_]) -> None:
        """Lay out `tokens` at one `position`, each with logits, behind `past` rows, and write the bias they run under.

        `visible` bool [tokens, K] says which of the last K keys each token sees, its own included; keys before those
        are seen by all.
        """
        n, keys = len(tokens), past + len(tokens)
        self.draft_limit = 0
        self._free_bias[0] = 1
        self.past_length[0] = past
        self.token_ids[:n] = tokens
        self.positions[:n] = position
        self.logit_rows[:n] = self._count[:n]
        self.sizes[_LOGITS] = n
        self._resize(n)
        view = self.sizes[_VIEW]
        bias = self._attn_bias[: n * view].reshape(n, view)
        bias.fill(_HIDDEN)
        first = keys - visible.shape[1]
        bias[:, :first] = 0.0
        bias[:, first:keys][visible] = 0.0
