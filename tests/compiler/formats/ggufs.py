"""GGUF files of small models, written by the package `gguf`, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedModel

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")


def random_blocks(kind: str, rows: int, inputs: int, seed: int) -> NDArray[np.uint8]:
    """Random blocks of a type that the package cannot quantise to: any bits are integers, but not any a float16."""
    rng = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 256, (rows * inputs // numbers, size), np.uint8)
    middle = {"Q4_K": 7.5, "Q5_K": 15.5, "Q6_K": 16}[kind]
    scale = rng.uniform(0.001, 0.002, len(blocks)) / middle  # weights of some hundredths, of either sign
    halves = np.stack([scale, scale * middle], axis=1).astype("<f2").view(np.uint8)
    if kind == "Q6_K":
        blocks[:, 192:208] = rng.integers(-20, 21, (len(blocks), 16)).astype(np.int8).view(np.uint8)
        blocks[:, 208:] = halves[:, :2]
    else:
        blocks[:, :4] = halves
    return blocks.reshape(rows, -1)


def stored_as(kind: str, weight: NDArray[np.float32], seed: int) -> NDArray[Any]:
    """The weight in GGUF's type `kind`: rounded by the package, or random blocks in its stead."""
    if kind in K_QUANTS:
        return random_blocks(kind, *weight.shape, seed)
    return gguf.quants.quantize(weight, Type[kind])


def rotated(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows as llama.cpp's converter orders q and k of Llama: the two halves of a head take turns."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unrotated(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """The inverse of `rotated`."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_model(
    path: Path,
    model: PreTrainedModel,
    kind: str | Mapping[str, str] = "F32",
    tokenizer: Tokenizer | None = None,
    metadata: Mapping[str, object] | None = None,
    extra: Mapping[str, NDArray[np.float32]] | None = None,
    vocabulary: tuple[list[str], list[gguf.TokenType]] | None = None,
) -> None:
    """Write the model's weights of two dimensions as `kind` (or by ends of names), and give it the numbers written.

    So the model is the oracle of what the file holds: its weights become `gguf.quants.dequantize` of the stored ones.
    """
    config: Any = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    own_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    facts = {
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.feed_forward_length": config.intermediate_size,
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
        "{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **dict.fromkeys(("{arch}.rope.dimension_count", "{arch}.attention.key_length"), head_dim),
        "{arch}.attention.value_length": head_dim,
        "{arch}.vocab_size": config.vocab_size,
    }
    if tokenizer is not None:
        write_byte_level(writer, tokenizer)
    if vocabulary is not None:
        writer.add_token_list(vocabulary[0])
        writer.add_token_types(vocabulary[1])
    adds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in (facts | dict(metadata or {})).items():
        adds[type(value)](key.format(arch=arch), value)  # type: ignore[operator]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        weight = parameter.detach().float().numpy()
        turned = next((heads[each] for each in heads if f".{each}." in name), 0) if arch == "llama" else 0
        weight = rotated(weight, turned) if turned else weight
        own = str(own_names.get_name(name, (".weight", ".bias")))
        wanted = kind if isinstance(kind, str) else next(v for k, v in kind.items() if k in name)
        if weight.ndim == 1 or wanted == "F32":
            writer.add_tensor(own, np.ascontiguousarray(weight))
            continue
        stored = stored_as(wanted, weight, seed)
        writer.add_tensor(own, stored, raw_dtype=Type[wanted])
        numbers = gguf.quants.dequantize(stored, Type[wanted])
        numbers = unrotated(numbers, turned) if turned else numbers
        parameter.data = torch.from_numpy(np.ascontiguousarray(numbers))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    close(writer)


def write_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str = "gpt-2") -> None:
    """The vocabulary of a byte-level BPE tokenizer, as llama.cpp's converter writes it."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [
        (gguf.TokenType.CONTROL if added[i].special else gguf.TokenType.USER_DEFINED)
        if i in added
        else gguf.TokenType.NORMAL
        for i in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
