"""A round as a value: planned (`plan.py`), run (`run.py`), accepted (`accept.py`), committed (`commit.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.drafters.base import Draft
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.program import Program
from outrider.runtime.rounds.views import KvView
from outrider.runtime.sequence import Sequence


@dataclass(slots=True)
class RoundClock:
    """Seconds at which a round began, had its drafts, and began to verify them: later than `drafted` where a tree that
    was drafted in place was cut first, None where one launch drafts and verifies."""

    began: float = field(default_factory=perf_counter)
    drafted: float = 0.0
    verified: float | None = None


@dataclass(slots=True)
class Round:
    """One pass of the target over sequences: which cache it reads, where each sequence lies in the step, the program.

    `confirming` are tentative tokens that the pass verifies. `kept` are the tokens of the step whose KV stays, once it
    has run; None: all that were fed.
    """

    view: KvView
    placed: list[Placement]
    program: Program
    confirming: dict[Sequence, Draft]
    clock: RoundClock
    kept: NDArray[np.int64] | None = None

    @property
    def tree_in_place(self) -> Draft | None:
        """The tree that the program drafts before it verifies, of a sequence that is alone."""
        draft = self.placed[0].draft
        return draft if draft is not None and draft.program is not None else None
