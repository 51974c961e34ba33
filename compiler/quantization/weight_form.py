"""What a recipe asks of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightForm:
    """Bits of a model's weights, and of its head and its embedding; None: they stay as they are."""

    bits: int
    head_bits: int | None
