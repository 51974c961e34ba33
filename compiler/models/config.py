"""Decoder geometry, read from a Hugging Face `config.json`.

One dataclass serves every family; the differences between families are entries of `families.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.compiler.models.attention import Attention, LayerKind
from outrider.compiler.models.config_layers import read_mixers, read_rotations, read_unrotated, read_windows
from outrider.compiler.models.config_reader import read_json
from outrider.compiler.models.decoder_keys import DecoderKeys, read_decoder_keys, text_of
from outrider.compiler.models.experts_config import ExpertsConfig, read_experts
from outrider.compiler.models.families import Activation, QkNorm
from outrider.compiler.models.mixers import MixerConfig
from outrider.compiler.models.quantization import Packing, read_packing
from outrider.compiler.models.rope import Rope, RopeScaling
from outrider.plans.errors import CheckpointError

WeightType = Literal["float32", "float16", "bfloat16"]
"""The types a decoder's weights can be loaded and compiled in."""


@dataclass(frozen=True)
class DecoderConfig(Attention):
    """Geometry of one decoder-only transformer. All sizes are counts of elements, not bytes.

    `rope_theta` and `rope_scaling` are the rotation of layers that see all tokens, and of the others unless
    `local_rope` has theirs. `windows` has each layer's window, None where it sees all; empty: none has one. Layers in
    `unrotated` rotate nothing. `rotary_size` numbers of each head are rotated (None: all). `score_scale` multiplies
    the products of queries and keys (None: the inverse root of the head's size).

    Layers in `mixer_layers` have `mixer` in place of attention. `output_gate`: attention's output has a gate.
    Layers in `expert_layers` have `experts` in place of the MLP. With `sinks` each head of a layer has a score of its
    own that stands in every softmax beside those of keys.

    Embeddings are multiplied by `embedding_scale`, what attention and MLP add to the residual stream by
    `residual_scale`, and logits are divided by `logit_divisor`. A softcap c makes c * tanh(x / c) of a score or logit.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...] = ()
    local_rope: Rope | None = None
    unrotated: frozenset[int] = frozenset()
    rotary_size: int | None = None
    norm_before: bool = True
    norm_after: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    score_scale: float | None = None
    sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    mixer: MixerConfig | None = None
    mixer_layers: frozenset[int] = frozenset()
    output_gate: bool = False
    experts: ExpertsConfig | None = None
    expert_layers: frozenset[int] = frozenset()

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mixer_layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        rope = Rope(self.rope_theta, self.rope_scaling, self.rotary_size or self.head_dim)
        local = rope if self.local_rope is None else self.local_rope
        return tuple(
            LayerKind(window, None if layer in self.unrotated else rope if window is None else local)
            for layer, window in enumerate(self.windows or (None,) * self.num_layers)
        )

    def windows_within(self, context: int) -> tuple[int, ...]:
        """Return by layer that attends the last tokens that it sees, 0 where that is all of `context` tokens; empty
        where all do."""
        given = [self.windows[layer] for layer in self.attention_layers] if self.windows else ()
        windows = tuple(window if window is not None and window < context else 0 for window in given)
        return windows if any(windows) else ()


def read_folder(
    checkpoint: Path, rope_scaling: RopeScaling | None = None, context: int | None = None
) -> tuple[DecoderConfig, Packing | None]:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint folder: the decoder, and how
    its weights are packed.

    `rope_scaling` replaces the checkpoint's own; `context` is the longest sequence, where a scaling depends on it.
    """
    file, generation = checkpoint / "config.json", checkpoint / "generation_config.json"
    raw = read_json(file)
    packing = read_packing(raw, file)
    # As in transformers, the end tokens of `generation_config.json` win.
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    own = raw.get("eos_token_id", text_of(raw).get("eos_token_id"))
    of = (own, file) if eos is None else (eos, generation)
    return config_from(raw, file, *of, rope_scaling, context), packing


def read_folder_config(checkpoint: Path, rope_scaling: RopeScaling | None = None) -> DecoderConfig:
    """Return the decoder of `read_folder`."""
    return read_folder(checkpoint, rope_scaling)[0]


def config_from(
    raw: Mapping[str, Any],
    path: Path,
    eos: Any,
    eos_path: Path,
    rope_scaling: RopeScaling | None,
    context: int | None = None,
) -> DecoderConfig:
    """Return the decoder that `raw`, the values of a `config.json`, describe; `path` is the file that has them.

    `eos` are the end tokens, as `eos_path` has them: None, one id or a list. `rope_scaling` and `context` are as for
    `read_folder`.
    """
    keys = read_decoder_keys(raw, path)
    family, heads, bias = keys.family, keys.num_attention_heads, keys.attention_bias
    kv_heads = keys.num_key_value_heads or heads
    head_dim = keys.head_dim or keys.hidden_size // heads
    if heads % kv_heads:
        raise keys.wrong(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 2 or not head_dim:
        raise keys.wrong(f"head_dim is {head_dim}; rotary positions need an even head_dim")
    experts, expert_layers = read_experts(raw, path, family, keys.num_hidden_layers)
    return DecoderConfig(
        family=family.name,
        vocab_size=keys.vocab_size,
        hidden_size=keys.hidden_size,
        num_layers=keys.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=keys.rms_norm_eps,
        max_positions=keys.max_position_embeddings,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=keys.mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        tie_embeddings=keys.tie_word_embeddings,
        eos_token_ids=_end_tokens(eos, eos_path, keys.vocab_size),
        norm_before=family.norm_before,
        norm_after=family.norm_after,
        activation=family.activation,
        windows=read_windows(keys),
        unrotated=read_unrotated(keys),
        experts=experts,
        expert_layers=expert_layers,
        **read_rotations(keys, head_dim, rope_scaling, context),
        output_gate=family.output_gate,
        **read_mixers(keys),
        **_factors(keys),
    )


def _factors(keys: DecoderKeys) -> dict[str, Any]:
    """Return the factors of the family, by field of `DecoderConfig`."""
    found = {name: getattr(keys, key) for name, (key, _) in keys.family.factors.items()}
    if (divisor := found.pop("score_divisor", None)) is not None:
        found["score_scale"] = divisor**-0.5
    if keys.family.scaled_embedding:
        found["embedding_scale"] = keys.hidden_size**0.5
    return found


def _end_tokens(value: Any, path: Path, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id must be one token id or a list of them, from 0 to {vocab_size - 1}, found {value!r}"
        )
    return tuple(ids)
