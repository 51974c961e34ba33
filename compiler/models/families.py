"""The table of model families: the settings that a family fixes, and the names of its weights in a checkpoint.

A new family whose graph is this decoder is one more entry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Slides = Literal["never", "all", "switched", "all_switched"] | int
"""Which layers see a window alone where config.json has no `layer_types`: none; all, where it has a window; those from
`max_window_layers` on, or all, where it sets `use_sliding_window`; or all but every n-th."""
QkNorm = Literal["none", "head", "whole"]
"""Whether queries and keys are normed before the rotation: each head by itself, or the whole projection as one."""
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class ExpertKeys:
    """What stands for absent keys of a mixture of experts: `count` for `num_experts`, `top_k` for
    `num_experts_per_tok`, `normalise` for `norm_topk_prob`, and `size`, an expert's width, for the key `size_key`.

    `clamped`: alpha and limit of units that are clamped, with biases, for `swiglu_alpha` and `swiglu_limit`. None: the
    unit is that of MLPs.
    """

    count: int
    top_k: int
    normalise: bool
    size: int | None = None
    size_key: str = "intermediate_size"
    clamped: tuple[float, float] | None = None

    @property
    def absent(self) -> dict[str, Any]:
        """What stands for absent keys of config.json, but for the number of experts, which has two names."""
        found: dict[str, Any] = {"num_experts_per_tok": self.top_k, "norm_topk_prob": self.normalise}
        if self.size is not None:
            found[self.size_key] = self.size
        return found | dict(zip(("swiglu_alpha", "swiglu_limit"), self.clamped or (), strict=False))


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face.

    `title` is what people call its models. A flag that is None follows the checkpoint's `attention_bias` (`mlp_bias`:
    its own key); one that is not stands, independent of that key, as in transformers. `activation_names` are the values
    of `activation_key` that mean the activation. `weights` maps a parameter name of `models.decoder.Decoder` (`{i}` is
    the layer) to the tensor's name in the checkpoint. `fused` maps a projection of the checkpoint that is several in
    one, by the last part of its name, to those that it holds, one below the other. `stacked` maps a tensor of all
    experts of a layer, `[experts, in, out]`, to the products that it holds, whose outputs take turns; its biases have
    `_bias` after its name. MXFP4 is read of these alone.

    What stands for an absent key: `head_dim` (None: the hidden size divided by the heads), `window` for
    `sliding_window`, `slides` for `layer_types`, `rope_theta`, `rope_scaling`, `rms_norm_eps`, `tie_embeddings`,
    `attention_bias`, `trained_positions` for `original_max_position_embeddings`. `pattern_key` holds the n of every
    n-th layer, where the family has such a key. `own_local_rope`: sliding layers have a rotation of their own, never
    scaled, of base `local_theta`. `fixed_layer_types`: transformers reads no `layer_types` for the family.
    `partial_rotation`: a part of each head may be rotated, as `partial_rotary_factor` says. Where `unrotated_every` is
    n, every n-th layer rotates nothing unless `no_rope_layers` says otherwise.

    `norm_offset` is added to the stored weights of all norms. `scaled_embedding`: embeddings are multiplied by the root
    of the hidden size. `factors` maps a field of `DecoderConfig` to the key of config.json that holds it, and to the
    value that stands for an absent key. `renamed` maps a key of config.json to the one that other families have in its
    place. `convolves`: layers of the kind `conv` have a short convolution in place of attention. `experts`: layers may
    have a mixture of experts in place of the MLP; names of
    their tensors have `{e}` for the expert's number. `sinks`: each head of a layer has a score of its own that stands
    in every softmax beside those of keys.
    """

    name: str
    title: str
    weights: Mapping[str, str]
    attention_bias: bool = False
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    qk_norm: QkNorm = "none"
    sinks: bool = False
    norm_before: bool = True
    norm_after: bool = False
    norm_offset: float = 0.0
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    activation_names: tuple[str, ...] = ("silu",)
    mlp_bias: bool | None = False
    tie_embeddings: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    window: int | None = None
    slides: Slides = "never"
    pattern_key: str | None = None
    fixed_layer_types: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    trained_positions: int | None = None
    partial_rotation: bool = False
    own_local_rope: bool = False
    local_theta: float = 10000.0
    unrotated_every: int | None = None
    scaled_embedding: bool = False
    experts: ExpertKeys | None = None
    factors: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    convolves: bool = False
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def absent(self) -> dict[str, Any]:
        """What stands for absent keys of config.json."""
        return {
            "head_dim": self.head_dim,
            "sliding_window": self.window,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            **dict(self.factors.values()),
        }


def _weights(**norms: str) -> dict[str, str]:
    """Return the names of weights; `norms` maps the norms of a layer to their names in a checkpoint."""
    named = {
        "embedding": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    for module, parts in (("self_attn", ("q", "k", "v", "o")), ("mlp", ("gate", "up", "down"))):
        for part in parts:
            for kind in ("weight", "bias"):
                named[f"layers.{{i}}.{part}.{kind}"] = f"model.layers.{{i}}.{module}.{part}_proj.{kind}"
    for norm, stored in (norms | {norm: f"self_attn.{norm}" for norm in ("q_norm", "k_norm")}).items():
        named[f"layers.{{i}}.{norm}.weight"] = f"model.layers.{{i}}.{stored}.weight"
    return named


def _stacked_weights(router: str, experts: str, stacked: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return the names of experts with biases below a layer: parts of the tensors that are `stacked`."""
    named = {
        f"layers.{{i}}.experts.router{ours}": f"model.layers.{{i}}.{router}.{kind}"
        for ours, kind in (("", "weight"), ("_bias", "bias"))
    }
    for stored, products in stacked.items():
        for product in products:
            for kind in ("", "_bias"):
                place = stacked_part(f"model.layers.{{i}}.{experts}.{stored}{kind}", "{e}", product)
                named[f"layers.{{i}}.experts.{product}{kind}"] = place
    return named


def stacked_part(stored: str, expert: int | str, product: str) -> str:
    """Return the name of what the tensor `stored` holds of one product of one expert."""
    return f"{stored}[{expert}].{product}"


_LFM2_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}


def _lfm2_weights() -> dict[str, str]:
    named = _weights(attention_norm="operator_norm", mlp_norm="ffn_norm")
    for usual, own in _LFM2_NAMES.items():
        named = {ours: stored.replace(usual, own) for ours, stored in named.items()}
    for ours, own in (("in_proj", "in_proj"), ("taps", "conv"), ("out_proj", "out_proj")):
        for kind in ("weight", "bias"):
            named[f"layers.{{i}}.conv.{ours}.{kind}"] = f"model.layers.{{i}}.conv.{own}.{kind}"
    return named


_BEFORE = _weights(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
_AFTER = _weights(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_BOTH = _weights(
    attention_norm="input_layernorm",
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_LLAMA = Family("llama", "Llama 2, 3", _BEFORE, qkv_bias=None, output_bias=None, mlp_bias=None)
_MISTRAL = Family("mistral", "Mistral", _BEFORE, window=4096, slides="all", fixed_layer_types=True)
_QWEN2 = Family("qwen2", "Qwen2, Qwen2.5", _BEFORE, qkv_bias=True, window=4096, slides="switched")
_QWEN3 = replace(_QWEN2, name="qwen3", title="Qwen3", qkv_bias=None, output_bias=None, qk_norm="head", head_dim=128)
_EXPERTS = {"layers.{i}.experts.router": "model.layers.{i}.mlp.gate.weight"} | {
    f"layers.{{i}}.experts.{each}": f"model.layers.{{i}}.mlp.experts.{{e}}.{each}_proj.weight"
    for each in ("gate", "up", "down")
}
_STACKED = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_SINKS = {"layers.{i}.sinks": "model.layers.{i}.self_attn.sinks"}
_GEMMA = replace(
    _LLAMA,
    name="gemma",
    title="Gemma",
    mlp_bias=False,
    head_dim=256,
    norm_offset=1.0,
    activation="gelu_tanh",
    activation_names=("gelu_pytorch_tanh", "gelu"),  # the older of the two names means the same in this family alone
    tie_embeddings=True,
    scaled_embedding=True,
)
_GEMMA2 = replace(
    _GEMMA,
    name="gemma2",
    title="Gemma 2",
    activation_key="hidden_activation",
    activation_names=("gelu_pytorch_tanh",),
    weights=_BOTH,
    norm_after=True,
    window=4096,
    slides=2,
    factors={
        "score_divisor": ("query_pre_attn_scalar", 256.0),
        "attention_softcap": ("attn_logit_softcapping", 50.0),
        "logit_softcap": ("final_logit_softcapping", 30.0),
    },
)
_OLMO2 = replace(
    _LLAMA,
    name="olmo2",
    title="OLMo 2",
    mlp_bias=False,
    weights=_AFTER,
    qk_norm="whole",
    norm_before=False,
    norm_after=True,
    rms_norm_eps=1e-5,
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _LLAMA,
        _MISTRAL,
        replace(_MISTRAL, name="ministral", title="Ministral", fixed_layer_types=False),
        _QWEN2,
        _QWEN3,
        replace(
            _QWEN3,
            name="qwen3_moe",
            title="Qwen3-MoE",
            weights=_BEFORE | _EXPERTS,
            head_dim=None,
            slides="all_switched",
            fixed_layer_types=True,
            experts=ExpertKeys(128, 8, normalise=False, size=768, size_key="moe_intermediate_size"),
        ),
        Family(
            "gpt_oss",
            "gpt-oss",
            _BEFORE | _SINKS | _stacked_weights("mlp.router", "mlp.experts", _STACKED),
            attention_bias=True,
            qkv_bias=None,
            output_bias=None,
            sinks=True,
            head_dim=64,
            rms_norm_eps=1e-5,
            window=128,
            slides=2,
            rope_theta=150000.0,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            experts=ExpertKeys(128, 4, normalise=True, clamped=(1.702, 7.0)),
            stacked=_STACKED,
        ),
        _GEMMA,
        _GEMMA2,
        replace(
            _GEMMA2,
            name="gemma3_text",
            title="Gemma 3 (text)",
            qk_norm="head",
            slides=6,
            pattern_key="sliding_window_pattern",
            rope_theta=1e6,
            own_local_rope=True,
            factors={
                "score_divisor": ("query_pre_attn_scalar", 256.0),
                "logit_softcap": ("final_logit_softcapping", None),
            },
        ),
        Family(
            "phi3",
            "Phi-3, Phi-4-mini",
            _BEFORE,
            rms_norm_eps=1e-5,
            slides="all",
            fixed_layer_types=True,
            trained_positions=4096,
            partial_rotation=True,
            fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ),
        _OLMO2,
        replace(
            _OLMO2,
            name="olmo3",
            title="OLMo 3",
            window=4096,
            slides=4,
            rope_theta=5e5,
            own_local_rope=True,
            local_theta=5e5,
        ),
        replace(
            _LLAMA,
            name="smollm3",
            title="SmolLM3",
            tie_embeddings=True,
            slides="switched",
            rope_theta=2e6,
            unrotated_every=4,
        ),
        replace(
            _LLAMA,
            name="granite",
            title="Granite 3",
            factors={
                "embedding_scale": ("embedding_multiplier", 1.0),
                "score_scale": ("attention_multiplier", 1.0),
                "residual_scale": ("residual_multiplier", 1.0),
                "logit_divisor": ("logits_scaling", 1.0),
            },
        ),
        Family(
            "lfm2",
            "LFM2",
            _lfm2_weights(),
            qk_norm="head",
            tie_embeddings=True,
            rms_norm_eps=1e-5,
            rope_theta=1e6,
            renamed={
                "norm_eps": "rms_norm_eps",
                "tie_embedding": "tie_word_embeddings",
                "block_ff_dim": "intermediate_size",
            },
            convolves=True,
        ),
    )
}

FACTOR_KEYS = frozenset(key for family in FAMILIES.values() for key, _ in family.factors.values())
"""Keys of config.json that change what some family computes."""
