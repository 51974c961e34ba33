"""Geometry of a block drafter's head."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

from outrider.compiler.models.eagle3_config import HeadConfig, Taps
from outrider.compiler.models.families import Activation, QkNorm
from outrider.compiler.models.rope import RopeScaling

MarkovKind = Literal["vanilla", "gated", "rnn"]


class Markov(NamedTuple):
    """A bias of the logits by the token before: its kind, and the rank of its two factors."""

    kind: MarkovKind
    rank: int


class Confidence(Enum):
    """The inputs of the linear map that predicts whether a drafted token will be accepted."""

    NONE = "none"
    HIDDEN = "hidden"
    HIDDEN_AND_MARKOV = "hidden and markov"


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Geometry of one head. `hidden_size` is its own width H, `target_hidden_size` the target's, Ht.

    A block has `block_size` slots: the tip, then masks (`mask_token_id`), at the tip's position and those after it.
    With `sample_from_anchor` the output at slot i predicts the token at slot i + 1, so that the tip's slot predicts
    too; without, the output at slot i predicts the token at slot i itself. With `causal` a slot sees the slots up to
    itself, without all slots of the block; all slots see the whole context. The head has no embedding or no output
    weights of its own where the target's serve.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    attention_bias: bool
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    sample_from_anchor: bool
    causal: bool
    mask_token_id: int
    markov: Markov | None
    confidence: Confidence
    own_embedding: bool
    own_lm_head: bool
    taps: Taps

    @property
    def first_slot(self) -> int:
        """The first slot whose output predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafted(self) -> int:
        """Tokens drafted by one block."""
        return self.block_size - self.first_slot

    @property
    def markov_rank(self) -> int:
        """Width of the token before as the bias and the confidence see it; 0 without a bias."""
        return 0 if self.markov is None else self.markov.rank

    @property
    def confidence_size(self) -> int:
        """Width of the confidence's input."""
        return self.hidden_size + (self.markov_rank if self.confidence is Confidence.HIDDEN_AND_MARKOV else 0)

    # What a `DecoderLayer` reads of a configuration: layers are Qwen3's.

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    output_bias = qkv_bias
    mlp_bias: ClassVar[bool] = False
    qk_norm: ClassVar[QkNorm] = "head"
    norm_before: ClassVar[bool] = True
    norm_after: ClassVar[bool] = False
    activation: ClassVar[Activation] = "silu"
    residual_scale: ClassVar[float] = 1.0
