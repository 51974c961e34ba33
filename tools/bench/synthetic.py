"""`--synthetic-accept`: drafts accepted to a length that is asked for, for studies of cost.

All stages of a round run, on what they always run on: the drafter drafts, the target verifies. Between the target's
engine and the op that accepts, a few logits are overwritten, so that the target's own choice, greedy or drawn, follows
a path of the draft for so many tokens and then leaves it. Accepting, and moving the rows that stay, then cost what they
cost at that length. The tokens are the drafter's and not the target's. Overwriting is part of a round's time: about a
hundredth of it.

Nothing in `runtime` knows of this: a session is forced only by being made here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outrider import Runtime, Session
from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.runtime.backends.base import BoundEngine, LoadedEngine
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.step_loop_pool import StepLoopPool
from outrider.tools.identity import CPU

_CERTAIN = np.float32(1e30)  # beside it, nothing else has any weight, at any temperature


def check_can_force(backend: str) -> None:
    """Raise `RequestError` for a backend whose logits are not on the host."""
    if backend != CPU:
        raise RequestError(
            f"--synthetic-accept changes logits on the host, where {backend} has none; pass --backend {CPU}."
        )


def forced_session(runtime: Runtime, length: int) -> Session:
    """A session whose drafts are accepted for `length` tokens, or as far as they reach; no other session is touched.

    Raises as `check_can_force`.
    """
    check_can_force(runtime.backend)
    engines = runtime.loaded.engines
    forced = {**engines, names.TARGET: _ForcedEngine(engines[names.TARGET], length)}
    return Session(StepLoopPool(replace(runtime.loaded, engines=forced)))


@dataclass(frozen=True)
class _ForcedEngine:
    """The target's engine, whose logits say after a draft that `length` of its tokens are right."""

    engine: LoadedEngine
    length: int

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        run = self.engine.bind(buffers, bound)
        columns = (
            names.TOKEN_IDS,
            names.PARENT,
            names.POSITIONS,
            names.ROW_SPLITS,
            names.LOGIT_INDICES,
            names.LOGITS_OUT,
        )
        token_ids, parent, positions, row_splits, logit_indices, logits = (
            buffers.array(names.TARGET, column) for column in columns
        )

        def forced(sizes: list[int]) -> None:
            run(sizes)
            tip, end = int(logit_indices[0]), int(row_splits[1])
            if end == tip + 1:  # no draft follows
                return
            depth = positions[tip:end] - positions[tip]
            node = int(np.argmax(depth == min(self.length, depth.max())))
            children = tip + 1 + np.flatnonzero(parent[tip + 1 : end] == tip + node)
            logits[node, token_ids[children]] = -_CERTAIN
            while node:
                above = int(parent[tip + node]) - tip
                logits[above, token_ids[tip + node]] = _CERTAIN
                node = above

        return forced
