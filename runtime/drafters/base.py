"""The contract of drafters that run on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Drafter(Protocol):
    """Proposes tokens for one branch.

    Ownership: the drafter owns what it has learned and the sequence it has been told; nobody else writes it. The
    caller owns the tree's arrays and lends them to `draft`. What was drafted leaves no trace: the drafter learns
    what became of it only through `extend`, so a rejection needs no undoing. A drafter knows nothing of the target's
    choices, buffers or slots, and cannot change the output.
    """

    def reset(self) -> None:
        """Forget everything: a new sequence begins."""

    def extend(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Learn tokens that have been committed, in order, each exactly once; the last one becomes the tip.

        Only confirmed tokens: neither drafted nor tentative ones.
        """

    def draft(self, limit: int, token_ids: NDArray[np.int64], parent: NDArray[np.int64], root: int) -> int:
        """Write at most `limit` nodes of a draft tree whose root, the tip, is node `root`; return how many.

        `token_ids` and `parent`, int64 [nodes], are the step's arrays, which several trees may share. The nodes go
        to indices root + 1, root + 2, ...; `parent` holds indices into the same arrays, ancestors come before
        descendants, and siblings are distinct tokens. Nothing else of the arrays is touched. The caller has
        room for `limit` nodes behind the root.
        """
