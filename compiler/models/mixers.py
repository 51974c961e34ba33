"""What stands in a layer in place of attention, as a config.json describes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated convolution over the last `kernel` tokens of a path, with biases or without."""

    kernel: int
    bias: bool
