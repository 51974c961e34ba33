"""Penalties for tokens that the text has already, as vLLM and OpenAI have them.

Only logits of such tokens are touched: the cost follows the text's distinct tokens, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.runtime.text.common_length import common_length
from outrider.runtime.text.rules import LogitsRule, RuleContext


class Penalties(LogitsRule):
    """Lowers logits of repeated tokens, in this order:

    - repetition: a logit of a token of the prompt or the generated text is divided by the penalty where it is above 0,
      else multiplied (arXiv 1909.05858);
    - frequency: minus the penalty times how often the token was generated;
    - presence: minus the penalty, if the token was generated.
    """

    def __init__(self, presence: float, frequency: float, repetition: float, prompt: Sequence[int] = ()) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._repetition = np.float32(repetition)
        first = list(dict.fromkeys(prompt)) if repetition != 1 else []
        self._place = {token: place for place, token in enumerate(first)}  # in the arrays below
        self._prompted = len(first)
        self._ids = np.array(first, np.int64)
        self._counts = np.zeros(len(first), np.float32)  # how often each was generated
        self._path: list[int] = []

    @classmethod
    def from_options(cls, context: RuleContext) -> list[LogitsRule]:
        presence, frequency, repetition = (
            context.values[f"{name}_penalty"] for name in ("presence", "frequency", "repetition")
        )
        return [cls(presence, frequency, repetition)]

    def begin(self, prompt: Sequence[int]) -> Penalties:
        return Penalties(float(self._presence), float(self._frequency), float(self._repetition), prompt)

    def apply(self, logits: NDArray[np.float32], path: Sequence[int]) -> None:
        self._count(path)
        used = len(self._place)
        ids, counts = self._ids[:used], self._counts[:used]
        found = logits[ids]
        if self._repetition != 1:
            repeated = np.where(found > 0, found / self._repetition, found * self._repetition)
            seen = counts > 0
            seen[: self._prompted] = True
            found = np.where(seen, repeated, found)
        found -= self._frequency * counts
        found -= self._presence * (counts > 0)
        logits[ids] = found

    def _count(self, path: Sequence[int]) -> None:
        """Count the tokens of `path`, continuing from the path that was counted last."""
        known = common_length(self._path, path)
        for token in self._path[known:]:
            self._counts[self._place[token]] -= 1
        del self._path[known:]
        for token in path[known:]:
            place = self._place_of(token)  # first: it may make the arrays anew
            self._counts[place] += 1
            self._path.append(token)

    def _place_of(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + 64, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(len(self._counts) + 64, np.float32)])
        self._ids[place] = token
        return place
