"""What a recipe asks of a model's weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightForm:
    """Bits of a model's weights, and of its head and its embedding; None: they stay as they are.

    Weights that the checkpoint stores as integers of blocks of 32, of no more bits, keep them. Others that it stores as
    integers are rounded again where `requantize` allows it.
    """

    bits: int
    head_bits: int | None
    requantize: bool = False
