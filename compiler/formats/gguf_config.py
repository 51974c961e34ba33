"""The configuration in a GGUF file's metadata, in the words of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.formats.gguf_file import GgufFile, Value
from compiler.formats.gguf_tensors import ROPE_FACTORS
from compiler.formats.gguf_tokenizer import CONTROL
from compiler.models.config import DecoderConfig, config_from
from compiler.models.rope import RopeScaling
from plans.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_EOS_KEYS = tuple(f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
)
"""Control tokens that end a text by their names, as llama.cpp has it: files give one end token, models have several."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
_EPSILON, _KEY_LENGTH, _VALUE_LENGTH = (
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
)
_ROTATED = "rope.dimension_count"
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
_NEUTRAL: dict[str, Value] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
}
"""Keys that may stand there with the value that changes nothing."""


def read_gguf_config(file: GgufFile, rope_scaling: RopeScaling | None = None) -> DecoderConfig:
    """Return the decoder that the file describes. `rope_scaling` replaces the file's own.

    Raises `CheckpointError` naming the key that is missing, wrong, or means what no decoder here computes.
    """
    raw = _raw(file)
    scaling = _table_scaling(file, raw) if rope_scaling is None else rope_scaling
    return config_from(raw, file.path, list(end_tokens(file)), file.path, scaling)


def end_tokens(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the metadata names, and control tokens known by their names."""
    named = [file.metadata[key] for key in _EOS_KEYS if key in file.metadata]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    by_name: list[int] = []
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        by_name = [int(i) for i in np.flatnonzero(types == CONTROL) if tokens[i] in _ENDS]
    for value in named:
        if not isinstance(value, int):
            raise CheckpointError(f"{file.path}: the end tokens of tokenizer.ggml must be token ids, found {value!r}")
    return tuple(dict.fromkeys([*(int(value) for value in named if isinstance(value, int)), *by_name]))


def _raw(file: GgufFile) -> dict[str, Any]:
    """Return the metadata as a `config.json` would have it."""
    metadata, path = file.metadata, file.path
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} are read"
        )
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge` and give the one file"
        )
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    for key in (*_SIZES, _EPSILON):
        if key not in own:
            raise CheckpointError(f"{path}: the key {architecture}.{key} is missing; convert the model again")
    known = {*_SIZES, *_OPTIONAL, *_SCALING, *_WITHOUT_EFFECT, _EPSILON, _KEY_LENGTH, _VALUE_LENGTH, _ROTATED}
    for key, value in own.items():
        if key not in known and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise CheckpointError(
                f"{path}: {architecture}.{key} is {_shown(value)}, which no decoder here computes; give another model"
            )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing, or no matrix; give a complete file")
    raw: dict[str, Any] = {theirs: own[key] for key, theirs in (_SIZES | _OPTIONAL).items() if key in own}
    raw |= {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": own[_EPSILON],
        "head_dim": _head_dim(own, path, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": None,
    }
    scaling = {theirs: own[key] for key, theirs in _SCALING.items() if key in own}
    if scaling.get("rope_type", "none") != "none":
        raw["rope_scaling"] = scaling
    return raw


def _head_dim(own: Mapping[str, Value], path: Path, architecture: str) -> Value | None:
    """Return the numbers of a head. Raises `CheckpointError` where keys, values or rotation have another size."""
    size, heads = own["embedding_length"], own["attention.head_count"]
    given = {key: own[key] for key in (_KEY_LENGTH, _VALUE_LENGTH, _ROTATED) if key in own}
    if len(set(map(str, given.values()))) > 1:
        listed = ", ".join(f"{architecture}.{key} {value}" for key, value in given.items())
        raise CheckpointError(
            f"{path}: a head's keys, values and rotation have several sizes: {listed}; give another model"
        )
    if given:
        return next(iter(given.values()))
    return size // heads if isinstance(size, int) and isinstance(heads, int) and heads > 0 else None


def _table_scaling(file: GgufFile, raw: dict[str, Any]) -> RopeScaling | None:
    """Return the scaling that divides each frequency by its number in the file; None where the file has none."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    wanted = (raw["head_dim"] // 2,)
    if tensor.type != "F32" or tensor.shape != wanted:
        raise CheckpointError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is {tensor.type} of shape {list(tensor.shape)}, "
            f"expected F32 of {list(wanted)}; give a complete file"
        )
    if "rope_scaling" in raw:
        raise CheckpointError(
            f"{file.path} has both {ROPE_FACTORS!r} and rope.scaling.type {raw['rope_scaling']['rope_type']!r}; set "
            "the recipe's rope_scaling"
        )
    factors = tuple(float(factor) for factor in file.numbers(ROPE_FACTORS))
    try:
        return RopeScaling.from_divisors(factors)
    except ValueError as error:
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r}: {error}") from None


def _shown(value: Value) -> str:
    return f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)
