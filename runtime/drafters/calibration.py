"""What a drafter's chances have been worth: the share of tokens that came, by how likely they were said to be."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf

_BINS = 10  # of equal width
_PRIOR = 16.0  # tokens that came as often as they were said to, in every bin
_PRIORS = [_PRIOR * (index + 0.5) / _BINS for index in range(_BINS)]  # how many of them came
_KEPT = 1 - 1 / 256  # of what is known, after each round: so a chance that is not verified any more is believed again


class Calibration:
    """Chances that the target reaches drafted tokens, from the drafter's own and from what was verified.

    A token's chance after its parent is the drafter's, times what such chances have been worth: tokens that came over
    tokens that should have come. Until something was verified, that is 1.
    """

    def __init__(self) -> None:
        self._came, self._said = [0.0] * _BINS, [0.0] * _BINS
        self._worth = [1.0] * (_BINS + 1)  # of each bin; a chance of 1 belongs to the last one

    def chances(self, parent: Sequence[int], scores: Sequence[float]) -> list[float]:
        """Chance of each node: of itself and all of its ancestors. No node's is above its parent's.

        `parent[i]` is the node that node i hangs from, -1 for the tip; `scores` are the drafter's log-probabilities,
        summed from the tip.
        """
        worth, found = self._worth, list[float]()
        for above, score in zip(parent, scores, strict=True):
            said = _chance(score, scores[above] if above >= 0 else 0.0)
            own = said * worth[int(_BINS * said)]
            if own > 1.0:
                own = 1.0
            found.append(own if above < 0 else own * found[above])
        return found

    def note_verified(self, parent: Sequence[int], scores: Sequence[float], accepted: set[int]) -> None:
        """Learn from a draft that was verified: the target has come to the nodes `accepted`, a path from the tip."""
        came, stated = [_KEPT * each for each in self._came], [_KEPT * each for each in self._said]
        for node, above in enumerate(parent):
            if above < 0 or above in accepted:  # else nobody knows whether it would have come
                said = _chance(scores[node], scores[above] if above >= 0 else 0.0)
                index = min(int(_BINS * said), _BINS - 1)
                stated[index] += said
                came[index] += node in accepted
        self._came, self._said = came, stated
        worth = [(one + prior) / (other + prior) for one, other, prior in zip(came, stated, _PRIORS, strict=True)]
        self._worth = [*worth, worth[-1]]


def _chance(score: float, before: float) -> float:
    """The drafter's chance of a node after its parent, whose score is `before`."""
    return exp(score - before) if score < before else 1.0 if before > -inf else 0.0
