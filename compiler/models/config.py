"""Decoder geometry, read from a Hugging Face `config.json`.

One dataclass serves every family; the differences between families are entries of `families.FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.compiler.models.attention import LayerKind
from outrider.compiler.models.config_layers import read_rotations, read_unrotated, read_windows
from outrider.compiler.models.config_reader import Reader, read_json
from outrider.compiler.models.experts_config import ExpertsConfig, read_experts
from outrider.compiler.models.families import FACTOR_KEYS, FAMILIES, Activation, Family, QkNorm
from outrider.compiler.models.quantization import read_packing
from outrider.compiler.models.rope import Rope, RopeScaling
from outrider.plans.errors import CheckpointError

WeightType = Literal["float32", "float16", "bfloat16"]
"""The types a decoder's weights can be loaded and compiled in."""


@dataclass(frozen=True)
class DecoderConfig:
    """Geometry of one decoder-only transformer. All sizes are counts of elements, not bytes.

    `rope_theta` and `rope_scaling` are the rotation of layers that see all tokens, and of the others unless
    `local_rope` has theirs. `windows` has each layer's window, None where it sees all; empty: none has one. Layers in
    `unrotated` rotate nothing. `rotary_size` numbers of each head are rotated (None: all). `score_scale` multiplies
    the products of queries and keys (None: the inverse root of the head's size).

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
    norm_behind: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    score_scale: float | None = None
    sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: ExpertsConfig | None = None
    expert_layers: frozenset[int] = frozenset()

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        rope = Rope(self.rope_theta, self.rope_scaling, self.rotary_size or self.head_dim)
        local = rope if self.local_rope is None else self.local_rope
        return tuple(
            LayerKind(window, None if layer in self.unrotated else rope if window is None else local)
            for layer, window in enumerate(self.windows or (None,) * self.num_layers)
        )


def read_folder_config(
    checkpoint: Path, rope_scaling: RopeScaling | None = None, context: int | None = None
) -> DecoderConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint folder.

    `rope_scaling` replaces the checkpoint's own; `context` is the longest sequence, where a scaling depends on it.
    Raises `CheckpointError` naming the file and the key.
    """
    path = checkpoint / "config.json"
    raw = read_json(path)
    read_packing(raw, path)
    return config_from(raw, path, *_eos(checkpoint, raw), rope_scaling, context)


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
    `read_folder_config`. Raises `CheckpointError`.
    """
    family = _family(raw, path)
    get = Reader(raw, path)
    _check_computed(raw, path, family)
    hidden_size = get.integer("hidden_size")
    num_heads = get.integer("num_attention_heads")
    head_dim = hidden_size // num_heads if family.head_dim is None else family.head_dim
    if raw.get("head_dim") is not None:
        head_dim = get.integer("head_dim")
    bias = get.boolean("attention_bias", family.attention_bias)
    vocab_size, layers = get.integer("vocab_size"), get.integer("num_hidden_layers")
    experts, expert_layers = read_experts(raw, path, get, family, layers)
    config = DecoderConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=get.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=get.rms_norm_eps(family.rms_norm_eps),
        max_positions=get.integer("max_position_embeddings", 2048),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=get.boolean("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        sinks=family.sinks,
        tie_embeddings=get.boolean("tie_word_embeddings", family.tie_embeddings),
        eos_token_ids=_end_tokens(eos, eos_path, vocab_size),
        norm_before=family.norm_before,
        norm_behind=family.norm_behind,
        activation=family.activation,
        windows=read_windows(raw, path, get, family, layers),
        unrotated=read_unrotated(raw, path, family, layers),
        experts=experts,
        expert_layers=expert_layers,
        **read_rotations(raw, path, family, head_dim, rope_scaling, context),
        **_factors(get, family, hidden_size),
    )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2 or not config.head_dim:
        raise CheckpointError(f"{path}: head_dim is {config.head_dim}; rotary positions need an even head_dim")
    return config


def _factors(get: Reader, family: Family, hidden_size: int) -> dict[str, Any]:
    """Return the factors of the family, by field of `DecoderConfig`."""
    found: dict[str, float | None] = {}
    for name, (key, default) in family.factors.items():
        found[name] = get.positive(key, default)
    if (divisor := found.pop("score_divisor", None)) is not None:
        found["score_scale"] = divisor**-0.5
    if family.scaled_embedding:
        found["embedding_scale"] = hidden_size**0.5
    return found


def _check_computed(raw: Mapping[str, Any], path: Path, family: Family) -> None:
    """Raise `CheckpointError` for a key that says what the decoder does not compute for this family."""
    activation = raw.get(family.activation_key)
    if activation is not None and activation not in family.activation_names:
        known = family.activation_names[0]
        raise CheckpointError(f"{path}: {family.activation_key} is {activation!r}; only {known!r} can be compiled")
    for key, causal in (("use_bidirectional_attention", False), ("is_causal", True)):
        if raw.get(key) not in (None, causal):
            raise CheckpointError(f"{path}: {key} is {raw[key]!r}, and a decoder sees earlier tokens alone")
    for key, (form, right) in _FORMS.items():
        if raw.get(key) is not None and not right(raw[key]):
            raise CheckpointError(f"{path}: {key} must be {form}, found {raw[key]!r:.60}")
    for key in sorted(FACTOR_KEYS - {key for key, _ in family.factors.values()}):
        if raw.get(key) not in (None, 1, 1.0):
            raise CheckpointError(
                f"{path}: {key} is {raw[key]!r}, which {family.title} models do not have, and transformers ignores it; "
                "remove it, or give the model_type of a family that has it"
            )


def _list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "torch_dtype": ("a text", lambda value: isinstance(value, str)),
    "dtype": ("a text", lambda value: isinstance(value, str)),
    "architectures": ("a list of texts", lambda value: _list_of(str, value)),
    "eos_token_id": ("one token id or a list of them", lambda value: isinstance(value, int) or _list_of(int, value)),
}
"""Keys that nothing here computes with, or that another file may overrule: a wrong value tells of a damaged file."""

_INSIDE = dict.fromkeys(
    ("gemma3", "mistral3"),
    " (its text model is: save that by itself; compiler/models/README.md says how)",
)
"""Advice for models that hold one of the families."""


def _family(raw: Mapping[str, Any], path: Path) -> Family:
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = _INSIDE.get(name, "") if isinstance(name, str) else ""
        raise CheckpointError(
            f"{path}: model_type {name!r} is not supported{hint}; known families: {', '.join(FAMILIES)} "
            "(`outrider families` says what each is)"
        )
    return FAMILIES[name]


def _eos(checkpoint: Path, raw: Mapping[str, Any]) -> tuple[Any, Path]:
    """Return the end tokens and their file; `generation_config.json` wins over `config.json`, as in transformers."""
    path = checkpoint / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    return (value, path) if value is not None else (raw.get("eos_token_id"), checkpoint / "config.json")


def _end_tokens(value: Any, path: Path, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id must be one token id or a list of them, from 0 to {vocab_size - 1}, found {value!r}"
        )
    return tuple(ids)
