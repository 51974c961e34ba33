"""Decoder geometry, read from a Hugging Face `config.json`.

One dataclass serves every family; the differences between families are entries of `families.FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compiler.models.families import FAMILIES, Family
from compiler.models.quantization import read_packing
from compiler.models.rope import LEAST_ROPE_THETA, MOST_ROPE_THETA, RopeScaling
from plans.errors import CheckpointError

WeightType = Literal["float32", "float16", "bfloat16"]
"""The types a decoder's weights can be loaded and compiled in."""

_MOST = {
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "hidden_size": 2**18,
    "target_hidden_size": 2**18,
    "intermediate_size": 2**20,
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
    "block_size": 2**10,
}
"""Largest accepted sizes, a few times those of any published model, so that a typo does not start an endless build."""
_MOST_POSITIONS = 2**31 - 1
ROPE_THETA = 10000.0
"""Base of the rotary frequencies where no key gives one, in every family here."""


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


def read_folder_config(checkpoint: Path, rope_scaling: RopeScaling | None = None) -> DecoderConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint folder.

    `rope_scaling` replaces the checkpoint's own. Raises `CheckpointError` naming the file and the key.
    """
    path = checkpoint / "config.json"
    raw = read_json(path)
    read_packing(raw, path)
    return config_from(raw, path, *_eos(checkpoint, raw), rope_scaling)


def config_from(
    raw: Mapping[str, Any], path: Path, eos: Any, eos_path: Path, rope_scaling: RopeScaling | None
) -> DecoderConfig:
    """Return the decoder that `raw`, the values of a `config.json`, describe; `path` is the file that has them.

    `eos` are the end tokens, as `eos_path` has them: None, one id or a list. Raises `CheckpointError`.
    """
    family = _family(raw, path)
    refuse_unsupported(raw, path)
    if family.window is not None:
        _refuse_window(raw, path, family.window)
    get = Reader(raw, path)

    hidden_size = get.integer("hidden_size")
    num_heads = get.integer("num_attention_heads")
    rope_theta, scaling = read_rope(raw, path, get, rope_scaling)
    head_dim = hidden_size // num_heads if family.head_dim is None else family.head_dim
    if raw.get("head_dim") is not None:
        head_dim = get.integer("head_dim")
    bias = get.boolean("attention_bias", False)
    vocab_size = get.integer("vocab_size")
    config = DecoderConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=get.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=get.rms_norm_eps(),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_positions=get.integer("max_position_embeddings", 2048),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=get.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_embeddings=get.boolean("tie_word_embeddings", family.tie_embeddings),
        eos_token_ids=_end_tokens(eos, eos_path, vocab_size),
    )
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2 or not config.head_dim:
        raise CheckpointError(f"{path}: head_dim is {config.head_dim}; rotary positions need an even head_dim")
    return config


class Reader:
    """Values of a `config.json` by key; a wrong value raises `CheckpointError` naming file, key and value."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self._raw, self._path = raw, path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self._path}: {key} must be a positive integer, found {value!r}")
        most = _MOST.get(key, _MOST_POSITIONS)
        if value > most:
            raise CheckpointError(f"{self._path}: {key} is {value}; at most {most} can be compiled")
        return value

    def number(self, key: str, default: float, *, least: float, most: float) -> float:
        value = self._raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise CheckpointError(f"{self._path}: {key} must be a number from {least:g} to {most:g}, found {value!r}")
        return float(value)

    def rope_theta(self, default: float) -> float:
        """Return the base of the rotary frequencies."""
        return self.number("rope_theta", default, least=LEAST_ROPE_THETA, most=MOST_ROPE_THETA)

    def rms_norm_eps(self) -> float:
        """Return the epsilon that RMS norms add to the mean of squares, in float32."""
        return self.number("rms_norm_eps", 1e-6, least=1e-30, most=1.0)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._path}: {key} must be true or false, found {value!r}")
        return value


def read_json(path: Path, missing: str = "a checkpoint folder needs config.json and *.safetensors") -> dict[str, Any]:
    """Read the JSON object in the file. Raises `CheckpointError`; `missing` is its advice where there is no file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; {missing}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold one JSON object")
    return raw


def refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    """Raise `CheckpointError` for a setting that no module here computes."""
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{path}: hidden_act is {raw['hidden_act']!r}; only 'silu' can be compiled")
    if raw.get("use_sliding_window"):
        raise CheckpointError(f"{path}: use_sliding_window is on; sliding-window attention cannot be compiled")
    layers = raw.get("layer_types")
    other = next((each for each in layers if each != "full_attention"), None) if isinstance(layers, list) else None
    if other is not None:
        raise CheckpointError(f"{path}: layer_types has {other!r}; only 'full_attention' can be compiled")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise CheckpointError(
            f"{path}: partial_rotary_factor is {raw['partial_rotary_factor']!r}; only whole heads can be rotated"
        )


def _refuse_window(raw: Mapping[str, Any], path: Path, default: int) -> None:
    """Raise `CheckpointError` unless `sliding_window` is null; an absent key means `default`, as in transformers."""
    window = raw.get("sliding_window", default)
    if window is not None:
        absent = "" if "sliding_window" in raw else " (the key is absent, and this is the family's default)"
        raise CheckpointError(
            f"{path}: sliding_window is {window!r}{absent}; sliding-window attention cannot be compiled yet. Give a "
            "checkpoint whose sliding_window is null"
        )


def _family(raw: Mapping[str, Any], path: Path) -> Family:
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(f"{path}: model_type {name!r} is not supported; known families: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def read_rope(
    raw: Mapping[str, Any], path: Path, get: Reader, replacement: RopeScaling | None
) -> tuple[float, RopeScaling]:
    """Read base and scaling in either spelling: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`.

    Two given spellings must agree: transformers takes `rope_scaling` alone and forgets the rest of `rope_parameters`.
    The checkpoint's scaling is not read where `replacement` replaces it, which is the way out of an unsupported
    scaling. Raises `CheckpointError`.
    """
    given: dict[str, dict[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"{path}: {key} must be a JSON object, found {value!r}")
        if value:
            given[key] = value
    theta = _rope_theta(given, path, get)
    if replacement is not None:
        return theta, replacement
    found = {key: _scaling(raw, path, key, values) for key, values in given.items()}
    forgotten = (
        len(given) > 1
        and given["rope_scaling"].get("rope_theta", raw.get("rope_theta")) is None
        and theta != ROPE_THETA
    )
    if forgotten or len(set(found.values())) > 1:
        raise CheckpointError(
            f"{path}: rope_parameters and rope_scaling contradict each other, and transformers reads rope_scaling "
            "alone, without the rope_theta of rope_parameters; keep one of them: move all keys into rope_parameters, "
            "or leave rope_scaling out and set the recipe's rope_scaling"
        )
    return theta, next(iter(found.values()), RopeScaling())


def _rope_theta(given: Mapping[str, dict[str, Any]], path: Path, get: Reader) -> float:
    """Return the one base that all given places agree on; ROPE_THETA where no place gives a base."""
    named = {f"{key}.rope_theta": Reader(v, path) for key, v in given.items() if "rope_theta" in v}
    bases = {place: read.rope_theta(ROPE_THETA) for place, read in named.items()}
    bases["rope_theta"] = get.rope_theta(next(iter(bases.values()), ROPE_THETA))
    (first, base), *others = bases.items()
    for place, other in others:
        if other != base:
            raise CheckpointError(f"{path}: {first} is {base:g} and {place} is {other:g}; remove the wrong one")
    return base


def _scaling(raw: Mapping[str, Any], path: Path, key: str, parameters: dict[str, Any]) -> RopeScaling:
    """Return the scaling that `parameters`, the object under `key`, describe."""
    values = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if values.get("partial_rotary_factor") == 1.0:
        del values["partial_rotary_factor"]
    name = "original_max_position_embeddings"
    outside, inside = raw.get(name), values.get(name)
    if outside is not None and inside is not None and outside != inside:
        raise CheckpointError(f"{path}: {name} is {outside!r} and {key}.{name} is {inside!r}; remove the wrong one")
    if inside is None:
        values[name] = raw.get("max_position_embeddings") if outside is None else outside
    try:
        return RopeScaling.from_huggingface(values)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


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
