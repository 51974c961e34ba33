"""The length of a drafted chain, by the entropy of the drafter's first distribution (EGAG)."""

from __future__ import annotations

from math import isfinite

from outrider.plans.manifest import EntropyGamma


class ChainLength:
    """gamma = clamp(int((1 - H) * gamma_max)), H being an entropy over that of the uniform distribution.

    With `beta`, the mean of these, each weighing `beta` times the one after it, rounded and clamped again.
    """

    def __init__(self, settings: EntropyGamma) -> None:
        self.settings = settings
        self._mean: float | None = None

    def reset(self) -> None:
        """Forget the lengths so far."""
        self._mean = None

    def choose(self, entropy: float) -> int:
        """The length of the chain whose first distribution has this normalised entropy."""
        s = self.settings
        gamma = self._clamp(int((1.0 - entropy) * s.gamma_max) if isfinite(entropy) else 0)
        self._mean = gamma if self._mean is None else s.beta * self._mean + (1 - s.beta) * gamma
        return self._clamp(round(self._mean))

    def _clamp(self, gamma: int) -> int:
        return min(max(gamma, self.settings.gamma_min), self.settings.gamma_max)
