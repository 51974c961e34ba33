"""The table of model families: the settings that a family fixes, and the names of its weights in a checkpoint.

A new family whose graph is this decoder is one more entry here.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    A flag that is None follows the checkpoint's `attention_bias`. `weights` maps a parameter name of
    `models.decoder.Decoder` (`{i}` is the layer) to the tensor's name in the checkpoint. `head_dim` stands for an
    absent `head_dim`; None: the hidden size divided by the heads. `window` stands for an absent `sliding_window`, for
    families whose attention has a window unless config.json says null; None for the others.
    """

    name: str
    qkv_bias: bool | None
    output_bias: bool | None
    qk_norm: bool
    tie_embeddings: bool
    head_dim: int | None = None
    window: int | None = None
    weights: dict[str, str] = field(default_factory=dict)


_WEIGHTS = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "layers.{i}.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.{i}.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
} | {
    f"layers.{{i}}.{ours}.{kind}": f"model.layers.{{i}}.{theirs}.{kind}"
    for ours, theirs in {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }.items()
    for kind in ("weight", "bias")
}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", qkv_bias=None, output_bias=None, qk_norm=False, tie_embeddings=False, weights=_WEIGHTS),
        Family(
            "mistral",
            qkv_bias=False,
            output_bias=False,
            qk_norm=False,
            tie_embeddings=False,
            window=4096,
            weights=_WEIGHTS,
        ),
        Family("qwen2", qkv_bias=True, output_bias=False, qk_norm=False, tie_embeddings=False, weights=_WEIGHTS),
        Family(
            "qwen3",
            qkv_bias=None,
            output_bias=None,
            qk_norm=True,
            tie_embeddings=False,
            head_dim=128,
            weights=_WEIGHTS,
        ),
    )
}
