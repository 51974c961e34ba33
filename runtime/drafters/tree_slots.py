"""The slots that a draft model's tree has filled: KV of accepted nodes is moved together, and stays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.runtime.execution.program import Program
from outrider.runtime.execution.step import DraftStep


class TreeSlots:
    """Slots that the levels of a draft model's tree have appended to its cache, of rejected nodes and accepted ones."""

    def __init__(self, name: str, of: object, step: DraftStep, compact: Program) -> None:
        self._step, self._compact = step, compact
        self._move_to, self._row, self._kept_indices, self._kept_count = (
            of(name, each)  # type: ignore[operator]
            for each in (names.MOVE_TO, names.TREE_SLOTS, names.KEPT_INDICES, names.KEPT_COUNT)
        )

    def keep(self, nodes: NDArray[np.int64]) -> None:
        """The tree has been cut to these nodes, ascending; the root is node 0."""
        self._row[1 : 1 + len(nodes)] = self._row[nodes]

    def gather(self, start: int, path: NDArray[np.int64]) -> int:
        """Move the KV of the nodes on `path`, which begins at a child of the root, to `start`; return of how many.

        Only the last node may have none: levels run every node that has a child. The slots ascend.
        """
        count = len(path)
        if count and self._row[path[-1]] < 0:
            count -= 1
        if count and self._row[path[count - 1]] >= count:  # else they are the first ones: in place
            np.take(self._row, path[:count], out=self._kept_indices[:count], mode="clip")
            self._kept_count[0], self._move_to[0] = count, start
            self._step.begin_grown(start)
            self._compact.run()
        return count
