"""Geometry of a layer's experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClampedUnit:
    """The unit of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, gate at most `limit`, up from -limit to limit.

    Products before and behind it have biases, and so has the router.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertsConfig:
    """`count` experts of width `size`, of which a token takes `top_k`; `normalise`: with weights that add up to 1."""

    count: int
    top_k: int
    size: int
    normalise: bool
    clamped: ClampedUnit | None = None
