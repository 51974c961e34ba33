"""The configuration in a GGUF file's metadata, in the words of a `config.json`."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from outrider.compiler.formats.gguf_file import GgufFile, shown
from outrider.compiler.formats.gguf_tensors import ROPE_FACTORS
from outrider.compiler.formats.gguf_tokenizer import TOKEN_TYPES, TOKENS
from outrider.compiler.formats.sentencepiece_model import CONTROL
from outrider.compiler.models.config import DecoderConfig, config_from
from outrider.compiler.models.config_reader import first_fault
from outrider.compiler.models.rope import RopeScaling
from outrider.plans.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_EOS_KEYS = tuple(f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
}  # fmt: skip
"""Tokens that end a text by their names, of any type: files give one end token, models have several.

They are llama.cpp's (`special_eog_ids` in `llama-vocab.cpp`), but for the separators of fill-in-the-middle.
"""
_CONTROL_END = "</s>"
"""Ends a text as a control token only, other than in llama.cpp: the vocabularies of Qwen have it as a tag of HTML."""
_GOES_ON = "<|end|>"
_ENDS_INSTEAD = ({"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"})
"""Where a vocabulary has one of each set, `_GOES_ON` ends a part of an answer only."""

_INTEGERS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_OPTIONAL = {"attention.head_count_kv", "rope.freq_base"}
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_SCALING_TYPE, _SCALING_CONTEXT = "rope.scaling.type", "rope.scaling.original_context_length"
_SCALING_NUMBERS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_WITHOUT_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
_KNOWN = {*_INTEGERS, *_NUMBERS, *_HEAD_SIZES, _SCALING_TYPE, _SCALING_CONTEXT, *_SCALING_NUMBERS, *_WITHOUT_EFFECT}
_NEUTRAL: dict[str, int | float] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
}
"""Keys that may stand there with the value that changes nothing."""


def read_gguf_config(file: GgufFile, rope_scaling: RopeScaling | None = None) -> DecoderConfig:
    """Return the decoder that the file describes. `rope_scaling` replaces the file's own."""
    raw = _raw(file)
    scaling = _table_scaling(file, raw) if rope_scaling is None else rope_scaling
    return config_from(raw, file.path, list(end_tokens(file)), file.path, scaling)


def end_tokens(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the metadata names, and those known by their names."""
    tokens = file.texts(TOKENS) or []
    types = file.array(TOKEN_TYPES, len(tokens), integers=True)
    known = [
        number
        for number, token in enumerate(tokens)
        if token in _ENDS or (token == _CONTROL_END and types is not None and types[number] == CONTROL)
    ]
    found = {tokens[number] for number in known}
    if all(found & instead for instead in _ENDS_INSTEAD):
        known = [number for number in known if tokens[number] != _GOES_ON]
    named = [value for key in _EOS_KEYS if (value := file.value(key, int)) is not None]
    return tuple(dict.fromkeys([*named, *known]))


def _raw(file: GgufFile) -> dict[str, Any]:
    """Return the metadata as a `config.json` would have it."""
    path, architecture = file.path, file.value("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {architecture!r}; GGUF files of {', '.join(ARCHITECTURES)} are read"
        )
    parts = file.value("split.count", int)
    if parts not in (None, 0, 1):
        raise CheckpointError(f"{path} is one of {parts} parts of a model; join them with `llama-gguf-split --merge`")
    _check_keys(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing, or no matrix; give a complete file")
    given = {name: file.value(f"{architecture}.{key}", int) for key, name in _INTEGERS.items()}
    numbers = {name: file.value(f"{architecture}.{key}", float) for key, name in _NUMBERS.items()}
    raw: dict[str, Any] = {name: value for name, value in (given | numbers).items() if value is not None}
    raw |= {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "head_dim": _head_dim(file, architecture, raw["hidden_size"], raw["num_attention_heads"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": None,
    }
    scaling = _scaling(file, architecture)
    return raw if scaling is None else raw | {"rope_scaling": scaling}


def _check_keys(file: GgufFile, architecture: str) -> None:
    """Raise `CheckpointError` for a key of the architecture that is missing, or means what no decoder here computes."""
    prefix = f"{architecture}."
    for key in (*_INTEGERS, *_NUMBERS):
        if key not in _OPTIONAL and prefix + key not in file.metadata:
            raise CheckpointError(f"{file.path}: the key {prefix}{key} is missing; convert the model again")
    for name, value in file.metadata.items():
        key = name.removeprefix(prefix)
        if not name.startswith(prefix) or key in _KNOWN:
            continue
        neutral = _NEUTRAL.get(key)
        if neutral is None or file.value(name, type(neutral)) != neutral:
            raise CheckpointError(
                f"{file.path}: {name} is {shown(value)}, which no decoder here computes; give another model"
            )


def _scaling(file: GgufFile, architecture: str) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies in the metadata; None where there is none.

    Without a type it is linear, as llama.cpp has it, and a factor of 0 or 1 scales nothing.
    """
    kind = file.value(f"{architecture}.{_SCALING_TYPE}", str)
    numbers = {name: file.value(f"{architecture}.{key}", float) for key, name in _SCALING_NUMBERS.items()}
    context = file.value(f"{architecture}.{_SCALING_CONTEXT}", int)
    if kind == "none" or (kind is None and numbers["factor"] in (None, 0, 1)):
        return None
    found = {"rope_type": "linear" if kind is None else kind, "original_max_position_embeddings": context, **numbers}
    return {name: value for name, value in found.items() if value is not None}


def _head_dim(file: GgufFile, architecture: str, hidden_size: int, heads: int) -> int:
    """Return the numbers of a head."""
    names = [f"{architecture}.{key}" for key in _HEAD_SIZES]
    given = {name: value for name in names if (value := file.value(name, int)) is not None}
    if len(set(given.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        raise CheckpointError(
            f"{file.path}: a head's keys, values and rotation have several sizes: {listed}; give another model"
        )
    if given:
        return next(iter(given.values()))
    if heads <= 0:
        key = f"{architecture}.attention.head_count"
        raise file.wrong(key, f"is {heads}, and must be positive; convert the model again")
    return hidden_size // heads


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
        return RopeScaling(kind="divisors", divisors=factors)
    except ValidationError as error:
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r}: {first_fault(error)}") from None
