"""Decoder geometry, read from a Hugging Face `config.json`.

One dataclass serves every family; what differs between families is a row of `families.FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compiler.models.families import FAMILIES, Family
from compiler.models.rope import RopeScaling
from plans.errors import CheckpointError

WeightType = Literal["float32", "float16", "bfloat16"]
"""The types a decoder's weights can be loaded and compiled in."""


@dataclass(frozen=True)
class DecoderConfig:
    """Geometry of one decoder-only transformer. All sizes are counts of elements, not bytes."""

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
    qk_norm: bool
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_config(checkpoint: Path, rope_scaling: RopeScaling | None = None) -> DecoderConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint folder.

    `rope_scaling` replaces the checkpoint's own. Raises `CheckpointError` naming the file and the key.
    """
    path = checkpoint / "config.json"
    raw = read_json(path)
    family = _family(raw, path)
    get = Reader(raw, path)

    hidden_size = get.integer("hidden_size")
    num_heads = get.integer("num_attention_heads")
    refuse_unsupported(raw, path)
    rope_theta, scaling = read_rope(raw, path, get, rope_scaling)
    head_dim = get.integer("head_dim") if raw.get("head_dim") is not None else hidden_size // num_heads
    bias = bool(raw.get("attention_bias", False))
    config = DecoderConfig(
        family=family.name,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=get.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=get.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_positions=get.integer("max_position_embeddings", 2048),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.tie_embeddings)),
        eos_token_ids=_eos(checkpoint, raw),
    )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head_dim is {config.head_dim}; rotary positions need an even head_dim")
    return config


class Reader:
    """Values of a `config.json` by key; a wrong one raises `CheckpointError` naming the file, the key and the value."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw, self._path = raw, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._path}: {key} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._path}: {key} must be a positive number, found {value!r}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._path}: {key} must be true or false, found {value!r}")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds; raises `CheckpointError`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; a checkpoint folder needs config.json and *.safetensors"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return raw


def refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` for a setting that no module here computes."""
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {raw['hidden_act']!r}; only 'silu' can be compiled")
    if raw.get("use_sliding_window"):
        raise CheckpointError(f"{path}: use_sliding_window is on; sliding-window attention cannot be compiled")


def _family(raw: Mapping[str, Any], path: Path) -> Family:
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {name!r} is not supported; known families: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def read_rope(
    raw: Mapping[str, Any], path: Path, get: Reader, replacement: RopeScaling | None
) -> tuple[float, RopeScaling]:
    """Both spellings: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

    A replaced scaling is not even read: the replacement is the way out where the checkpoint's own is unsupported.
    """
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"{path}: the rope scaling must be a JSON object, found {parameters!r}")
    theta = Reader(parameters, path) if "rope_theta" in parameters else get
    rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
    rest.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    base = theta.number("rope_theta", 10000.0)
    try:
        return base, replacement or RopeScaling.from_huggingface(rest)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _eos(checkpoint: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """`generation_config.json` wins over `config.json`, as in transformers; one id or a list."""
    path = checkpoint / "generation_config.json"
    value = read_json(path).get("eos_token_id") if path.exists() else None
    if value is None:
        path, value = checkpoint / "config.json", raw.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise CheckpointError(f"{path}: eos_token_id must be one token id or a list of them, found {value!r}")
    return tuple(ids)
