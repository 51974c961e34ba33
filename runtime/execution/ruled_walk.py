"""Rules of requests, applied between the target's engine and the accept stage.

The accept stage walks down each draft tree along the target's choices. This walk goes before it, to apply the rules to
each row of logits just before the row is chosen from: the accept stage then makes the same choices. Rows that the walk
does not come to are left as they are.
"""

from __future__ import annotations

from collections import abc
from math import isfinite
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plans.errors import RequestError
from outrider.plugins import native
from outrider.plugins.ops import OPS
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.execution.layout import Placement
from outrider.runtime.execution.step import TargetStep
from outrider.runtime.sequence import Sequence
from outrider.runtime.text.rules import failing_alone


class RuledWalk:
    """Applies the rules of sequences to the logits of a step, and chooses from a row as the accept stage does.

    Its time is counted as of a program of one stage.
    """

    stage_names, is_engine = ("rules",), (False,)

    def __init__(self, buffers: Buffers, step: TargetStep) -> None:
        self.nanoseconds = [0]
        self._buffers, self._step = buffers, step
        self._by_rejection = buffers.arrays[names.BY_REJECTION]
        self._logits = buffers.array(names.TARGET, names.LOGITS_OUT)
        self._raw = np.zeros(self._logits.shape[1], np.float32)  # the row that is being changed, as it was
        self._own: dict[str, NDArray[Any]] = {
            names.LOGIT_INDICES: np.zeros(1, np.int64),
            names.POSITIONS: np.zeros(1, np.int64),
            names.BRANCH: np.zeros(1, np.int64),
            names.COMMITTED: np.zeros(1, np.int64),
        }
        self._choices: dict[int, native.BoundOp] = {}  # by row of logits

    def run(self, placed: abc.Sequence[Placement]) -> None:
        """Apply the rules of the sequences to the rows of logits that the accept stage will choose from.

        Where a rule allows no token, its row stays, and `Placement.stuck` says so.
        """
        began = perf_counter_ns()
        for each in placed:
            if self._by_rejection[each.sequence.number]:
                self._apply_along(each)
            else:
                self._walk(each)
        self.nanoseconds[0] += perf_counter_ns() - began

    def _walk(self, placed: Placement) -> None:
        sequence, root = placed.sequence, placed.root
        children = self._children(placed)
        path, node = sequence.generated, 0
        while self._apply(placed, node, path) is not None:
            if node not in children:
                break
            token = self._choose(placed.first + node, int(self._step.positions[root + node]), sequence.number)
            child = children[node].get(token)
            path.append(token)
            if child is None or self._ends(sequence, path):
                break
            node = child

    def _apply_along(self, placed: Placement) -> None:
        """Apply the rules along a chain, as far as the rules allow its tokens: acceptance by rejection reads the row of
        each node that it may come to."""
        path = placed.sequence.generated
        tokens: list[int] = self._step.token_ids[placed.root + 1 : placed.root + placed.drafted + 1].tolist()
        row = self._apply(placed, 0, path)
        for node, token in enumerate(tokens, 1):
            if row is None or np.isneginf(row[token]):
                break
            path.append(token)
            if self._ends(placed.sequence, path):
                break
            row = self._apply(placed, node, path)

    @staticmethod
    def _ends(sequence: Sequence, path: list[int]) -> bool:
        """Whether the generation is over after `path`."""
        generation = sequence.generation
        return path[-1] in generation.request.eos_token_ids or generation.prompted + len(path) >= generation.end

    def _children(self, placed: Placement) -> dict[int, dict[int, int]]:
        """Children of each node by token, of equal ones the first; nodes count from the tip, node 0."""
        root, end = placed.root, placed.root + placed.drafted + 1
        children: dict[int, dict[int, int]] = {}
        tokens: list[int] = self._step.token_ids[root + 1 : end].tolist()
        parents: list[int] = self._step.parent[root + 1 : end].tolist()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            children.setdefault(parent - root, {}).setdefault(token, node)
        return children

    def _apply(self, placed: Placement, node: int, path: list[int]) -> NDArray[np.float32] | None:
        """Apply the sequence's rules to the row of a node; return the row, None where no token may follow."""
        sequence, at = placed.sequence, placed.first + node
        row: NDArray[np.float32] = self._buffers.rows(names.TARGET, names.LOGITS_OUT, at, at + 1)[0]
        try:
            self._change(sequence, row, path)
        except RequestError as error:
            np.copyto(row, self._raw)
            placed.stuck = len(path) - len(sequence.tokens) + sequence.generation.prompted, error
            return None
        if sequence.generation.request.logprobs is not None:
            placed.raw_logits = {**(placed.raw_logits or {}), at: self._raw.copy()}
        self._buffers.send_rows(names.TARGET, names.LOGITS_OUT, at, at + 1)
        return row

    def _change(self, sequence: Sequence, row: NDArray[np.float32], path: list[int]) -> None:
        """Apply the sequence's rules to the row after `path`, and keep the row as it was.

        Raises RequestError where the rules allow no token, or make logits that are no numbers.
        """
        np.copyto(self._raw, row)
        for rule in sequence.generation.rules:
            with failing_alone(rule.name):
                rule.apply(row, path)
        highest = float(row.max())
        if highest == -np.inf:
            raise RequestError("No token may follow: the rules of the request exclude all tokens of the vocabulary.")
        if not isfinite(highest) and isfinite(float(self._raw.max())):
            raise RequestError(f"The rules of the request make logits that are no numbers: their maximum is {highest}.")

    def choose_again(self, placed: Placement) -> int:
        """Apply the rules after an accept stage that cannot be preceded, and choose the token after the tip again."""
        row = self._buffers.rows(names.TARGET, names.LOGITS_OUT, placed.first, placed.first + 1)[0]
        self._change(placed.sequence, row, placed.sequence.generated)
        position = int(self._step.positions[placed.root])
        return self._choose(placed.first, position, placed.sequence.number)

    def _choose(self, at: int, position: int, number: int) -> int:
        """Choose from row `at` as the op Sample does, for the sequence `number` after the token at `position`."""
        own = self._own
        own[names.POSITIONS][0], own[names.BRANCH][0] = position, number
        choice = self._choices.get(at)
        if choice is None:
            bound = {tensor.name: self._bound(tensor.name, at) for tensor in OPS["Sample"].schema.tensors}
            choice = self._choices[at] = native.create("Sample", bound)
        choice(1, 1)
        return int(own[names.COMMITTED][0])

    def _bound(self, tensor: str, at: int) -> NDArray[Any]:
        if tensor == names.LOGITS_OUT:
            return self._logits[at : at + 1]
        return self._own[tensor] if tensor in self._own else self._buffers.arrays[tensor]
