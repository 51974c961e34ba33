"""Rules about single tokens: which may come at all, which not before so many others, and what their logits get."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.text.rules import LogitsRule, RuleContext


class AllowedTokens(LogitsRule):
    """Excludes all tokens but some."""

    def __init__(self, allowed: Collection[int]) -> None:
        self._ids = np.array(sorted(set(allowed)), np.int64)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        kept = logits[self._ids]
        logits.fill(-np.inf)
        logits[self._ids] = kept


class MinTokens(LogitsRule):
    """Excludes end tokens until so many tokens were generated."""

    def __init__(self, count: int, ends: Collection[int]) -> None:
        self._count, self._ends = count, np.array(sorted(set(ends)), np.int64)

    @classmethod
    def from_options(cls, context: RuleContext) -> list[LogitsRule]:
        return [cls(context.values["min_tokens"], context.ends)] if context.ends else []

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        if len(path) < self._count:
            logits[self._ends] = -np.inf


class LogitBias(LogitsRule):
    """Adds a bias to the logits of some tokens."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._ids = np.array(list(biases), np.int64)
        self._biases = np.array(list(biases.values()), np.float32)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        logits[self._ids] += self._biases
