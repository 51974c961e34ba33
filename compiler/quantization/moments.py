"""How the inputs of a product vary together: what makes one rounding error matter more than another.

An error e of a row of weights moves the output by e . x, whose mean square over inputs x is e^T M e with M the mean of
x x^T. M is kept in windows along its diagonal, so that its size grows with the inputs and not with their square, and
so that a few thousand tokens determine it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 1024
"""Inputs whose products are kept, a multiple of 32. With 256 the reference loses a third of what feedback gains."""
_DAMPING = 0.01
"""Share of the inputs' mean square that is added to that of each, so that few tokens do not overrule the weights."""


@dataclass(frozen=True)
class Moments:
    """Means over inputs x `[K]` of x x^T, in windows `[w, w]` of float64, and of |x|, `magnitudes` `[K]`.

    `roots` are the upper U with U^T U the inverse of each window, damped.
    """

    windows: tuple[Tensor, ...]
    roots: tuple[Tensor, ...]
    magnitudes: Tensor

    def divided(self, scales: Tensor) -> Moments:
        """Return the moments of inputs that are divided by `scales` `[K]`."""
        parts = torch.split(scales.double(), WINDOW)
        return Moments(
            tuple(mean / (s[:, None] * s) for mean, s in zip(self.windows, parts, strict=True)),
            tuple(root * s for root, s in zip(self.roots, parts, strict=True)),
            self.magnitudes / scales,
        )

    def cost(self, errors: Tensor) -> Tensor:
        """Return the mean square of the outputs of `errors` f32 `[N, K]` in weights, of each output `[N]`.

        The part that errors in different windows have in common is left out.
        """
        parts = torch.split(errors, WINDOW, dim=1)
        costs = [((part @ mean.float()) * part).sum(1) for mean, part in zip(self.windows, parts, strict=True)]
        return torch.stack(costs).sum(0)


class MomentSums:
    """Moments of inputs that come one text after another."""

    def __init__(self, inputs: int) -> None:
        sizes = [min(WINDOW, inputs - first) for first in range(0, inputs, WINDOW)]
        self._windows = [torch.zeros(size, size, dtype=torch.float64) for size in sizes]
        self._magnitudes, self._count = torch.zeros(inputs, dtype=torch.float64), 0

    def add(self, x: Tensor) -> None:
        """Take in inputs f32 `[n, K]`."""
        self._count += len(x)
        self._magnitudes += x.abs().sum(0)
        for window, part in zip(self._windows, torch.split(x, WINDOW, dim=1), strict=True):
            window += part.T @ part

    def moments(self) -> Moments:
        windows = tuple(window / self._count for window in self._windows)
        return Moments(windows, tuple(_root(mean) for mean in windows), self._magnitudes / self._count)


def _root(mean: Tensor) -> Tensor:
    size = float(mean.diagonal().mean()) or 1.0  # 1: of inputs that are always 0
    damped = mean + torch.eye(len(mean), dtype=mean.dtype) * (_DAMPING * size)
    root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return root
