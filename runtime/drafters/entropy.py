"""Chains of a draft model that are as long as it is sure: EGAG, FEATURES row 15."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.manifest import EntropyGamma, Geometry, GraphDrafter
from runtime.drafters.graph import EngineDrafter
from runtime.execution.buffers import Buffers
from runtime.execution.program import Program
from runtime.execution.step import DraftStep, TargetStep
from runtime.kv.slots import BRANCH

_LOG = logging.getLogger("outrider")


class ChainLength:
    """gamma = clamp(int((1 - H) * gamma_max)), H being an entropy over that of the uniform distribution.

    With `beta`, the mean of these, each weighing `beta` times the one after it, rounded and clamped again.
    """

    def __init__(self, settings: EntropyGamma) -> None:
        self._settings = settings
        self._mean: float | None = None

    def reset(self) -> None:
        """Forget the lengths so far."""
        self._mean = None

    def choose(self, entropy: float) -> int:
        """The length of the chain whose first distribution has this normalised entropy."""
        s = self._settings
        gamma = self._clamp(int((1.0 - entropy) * s.gamma_max) if isfinite(entropy) else 0)
        self._mean = gamma if self._mean is None else s.beta * self._mean + (1 - s.beta) * gamma
        return self._clamp(round(self._mean))

    def _clamp(self, gamma: int) -> int:
        return min(max(gamma, self._settings.gamma_min), self._settings.gamma_max)


class EntropyChain(EngineDrafter):
    """Drafts a token a run of its engine: how many there will be is known after the first.

    A chain's rows are committed as they come; `_start` is where those behind the tip's begin.
    """

    def __init__(
        self,
        settings: GraphDrafter,
        length: EntropyGamma,
        geometry: Geometry,
        buffers: Buffers,
        step: DraftStep,
        extend: Program,
        draft: Program,
    ) -> None:
        super().__init__(settings, geometry, buffers, step, extend)
        self._name, self._draft, self._nodes = settings.name, draft, 1 + length.gamma_max
        self._length = ChainLength(length)
        self._first_entropy = buffers.of(settings.name, names.DRAFT_ENTROPY)
        self._token = buffers.of(settings.name, names.TREE_TOKEN_IDS)[1:]
        self._score = buffers.of(settings.name, names.TREE_SCORE)[1:]
        self.scores: NDArray[np.float32] = np.zeros(self._nodes, np.float32)
        self._buffers, self._rejects = buffers, settings.acceptance == "rejection"
        self._start = 0

    def rounds(self, length: int, step: TargetStep) -> Iterator[tuple[str, tuple[str, ...]]]:
        for _ in self._feeds(length):
            yield names.draft(self._name), (self._name,)
        for nodes in range(self._nodes, 1, -1):
            if length < self._room and length - 1 + nodes <= step.largest_view:
                step.begin_warmup(length, nodes - 1)
                yield names.speculate(self._name), (names.TARGET,)

    def resume(self, tokens: Sequence[int], rows: int, passes: int) -> int:
        self._length.reset()
        return super().resume(tokens, rows, passes)

    def begin(self, tokens: Sequence[int], step: TargetStep, limit: int) -> str | None:
        """Draft, and write the chain behind the tip."""
        if not self._lay_out(tokens, step, self._nodes):
            return None
        own, slots = self._step, self._slots
        self._draft.run()
        slots.commit(own.new_tokens, kept=None)
        self._start = slots.length
        self.entropy = float(self._first_entropy[0])
        gamma = self._length.choose(self.entropy)
        _LOG.debug("drafter %s: position %d, entropy %.3f, gamma %d", self._name, len(tokens), self.entropy, gamma)
        count = min(gamma, limit)
        for node in range(1, count + 1):
            if node > 1:
                own.begin(slots.length, self.kept.end, self._token.tolist(), BRANCH)
                self._tip_position[BRANCH] += 1
                self._draft.run()
                slots.commit(1, kept=None)
            step.token_ids[node] = self._token[0]
            step.parent[node] = node - 1
            self.scores[node] = self.scores[node - 1] + self._score[0]
            if self._rejects:
                self._buffers.copy_row((self._name, names.DRAFT_PROBS, 1), (names.TARGET, names.DRAFT_PROBS, node))
        step.append_nodes(count)
        self._drafting = True
        return names.speculate(self._name)

    def follow(self, start: int, rows: int, kept: NDArray[np.int64] | None, passes: int) -> None:
        if self._drafting:
            self._slots.truncate(self._start + rows - 1)
            self._drafting = False
        self._passes = passes
