"""The buffers of one session, and the step being prepared in them.

This object owns the addresses: every buffer is allocated here once, at its largest size, and nothing
replaces it. A step is described by the leading entries of the step buffers and by `sizes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.check import session_bytes
from plans.errors import PlanError
from plans.manifest import Geometry, TargetPlan
from runtime.sampling import SamplingParams

_NEW, _VIEW, _LOGITS = (names.SYMBOLS.index(s) for s in (names.NEW, names.VIEW, names.LOGITS))


class Step:
    """New tokens of a step: first the pending ones, a chain whose last is the tip, then drafted nodes."""

    def __init__(self, plan: TargetPlan, geometry: Geometry) -> None:
        try:
            self.arrays: dict[str, NDArray[Any]] = {
                buffer.name: np.zeros(buffer.resolve(plan.symbols), buffer.dtype.numpy) for buffer in plan.buffers
            }
        except MemoryError:
            raise PlanError(
                f"a session of this plan needs {session_bytes(plan) / 1e9:.1f} GB for its buffers, more than this "
                "machine gives; build the plan with a smaller capacity.context"
            ) from None
        for name, view in plan.views.items():
            self.arrays[name] = self.arrays[view.buffer][view.plane : view.plane + 1]
        self.sizes = [0] * len(names.SYMBOLS)
        self.max_nodes = plan.symbols[names.LOGITS] - 1
        self.draft_limit = 0
        self._bucket, self._largest_view = geometry.view_bucket, plan.symbols[names.VIEW]
        self.token_ids = self.arrays[names.TOKEN_IDS]
        self.positions = self.arrays[names.POSITIONS]
        self.branch = self.arrays[names.BRANCH]
        self.parent = self.arrays[names.PARENT]
        self.logit_rows = self.arrays[names.LOGIT_ROWS]
        self.bim = self.arrays[names.BIM]
        self.past_length = self.arrays[names.PAST_LENGTH]
        self.kept_rows = self.arrays[names.KEPT_ROWS]
        self.logits = self.arrays[names.LOGITS_OUT]
        self.bim.fill(-2)
        self._count = np.arange(len(self.token_ids) + 1)  # ready-made chains: parents, and offsets of positions

    def set_sampling(self, params: SamplingParams, branch: int = 0) -> None:
        """Fill a branch's sampling slot."""
        self.arrays[names.TEMPERATURE][branch] = params.temperature
        self.arrays[names.TOP_K][branch] = params.top_k
        self.arrays[names.TOP_P][branch] = params.top_p
        self.arrays[names.FILTER_ORDER][branch] = params.filter_order == "temperature_last"
        self.arrays[names.SEED][branch] = params.seed
        self.arrays[names.STREAM][branch] = params.stream

    def begin(self, past: int, position: int, tokens: list[int], branch: int, *, logits: bool) -> None:
        """Lay out pending `tokens` as a chain behind `past` committed rows, the first at `position`.

        `logits` asks for those of the last token, the tip. No draft may follow unless `draft_limit` is raised.
        """
        n = len(tokens)
        self.draft_limit = 0
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
        self.logit_rows[0] = n - 1
        self.sizes[_NEW] = n
        self.sizes[_LOGITS] = int(logits)
        self.fit_view()

    def append_nodes(self, count: int) -> None:
        """Complete `count` drafted nodes whose tokens and parents a drafter wrote behind the tip."""
        n = self.sizes[_NEW]
        for node in range(n, n + count):
            parent = self.parent[node]
            self.positions[node] = self.positions[parent] + 1
            self.branch[node] = self.branch[parent]
            self.logit_rows[node - n + 1] = node
        self.sizes[_NEW] = n + count
        self.sizes[_LOGITS] += count
        self.fit_view()

    def fit_view(self) -> None:
        """Keys in view, rounded up so that the tensors that depend on it change rarely."""
        keys = int(self.past_length[0]) + self.sizes[_NEW]
        self.sizes[_VIEW] = min(-(-keys // self._bucket) * self._bucket, self._largest_view)

    @property
    def new_tokens(self) -> int:
        return self.sizes[_NEW]
