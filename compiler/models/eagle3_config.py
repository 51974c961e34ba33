"""Geometry of an EAGLE3 draft head, and the recipe's overrides of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from outrider.compiler.models.attention import Attention
from outrider.compiler.models.rope import RopeScaling

TAPS = 3
"""Number of the target's residual streams that make one feature."""


class Taps(NamedTuple):
    """The target's layers whose incoming residual streams make a head's feature (transformers' `hidden_states` at
    those indices), in the order of their concatenation, and the reason for this choice."""

    layers: tuple[int, ...]
    reason: str


class HeadConfig(Attention):
    """Facts of any head: its width, the target's, their vocabularies, and the target's layers that it reads."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: Taps

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.taps.layers

    @property
    def feature_size(self) -> int:
        return len(self.taps.layers) * self.target_hidden_size


class Eagle3Overrides(NamedTuple):
    """A recipe's values for a head in place of its config.json's; None leaves a value to the checkpoint."""

    rope_theta: float | None = None
    aux_layers: tuple[int, int, int] | None = None
    norm_output: bool | None = None


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Geometry of one draft head. `hidden_size` is its own width H, `target_hidden_size` the target's, Ht.

    `fc_norm`: each stream is normed before `fc`. `norm_output`: levels feed back h after the final norm, not before it
    (EAGLE 3.1, arXiv 2605.09992).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    own_embedding: bool
    fc_norm: bool
    norm_output: bool
    taps: Taps

    num_layers: ClassVar[int] = 1  # type: ignore[misc]
