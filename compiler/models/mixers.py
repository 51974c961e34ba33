"""What stands in a layer in place of attention, as a config.json describes it: each keeps a state of its sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated convolution over the last `kernel` tokens of a path, with biases or without."""

    kernel: int
    bias: bool

    def channels(self, hidden: int) -> int:
        """How many numbers of a token are convolved, of a model with so many in its residual stream."""
        return hidden


@dataclass(frozen=True)
class DeltaConfig:
    """A gated delta net: queries and keys of `key_heads` heads of `keys` numbers, values of `heads` heads of `values`,
    convolved together over the last `kernel` tokens."""

    kernel: int
    key_heads: int
    heads: int
    keys: int
    values: int
    bias = False

    @property
    def inner(self) -> int:
        """How many values a token has."""
        return self.heads * self.values

    def channels(self, hidden: int) -> int:
        return 2 * self.key_heads * self.keys + self.inner

    @property
    def record(self) -> int:
        """How many numbers of a token its state is changed by: keys, values, decays and rates."""
        return self.key_heads * self.keys + self.inner + 2 * self.heads


MixerConfig = ShortConvConfig | DeltaConfig
