"""A checkpoint as a GGUF file, which llama.cpp and OpenVINO GenAI read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType, TokenType
from numpy.typing import NDArray

from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.opening import open_checkpoint
from outrider.compiler.tensor_source import TensorSource
from outrider.plans.errors import OutriderError

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
_BLOCK = 32  # of Q4_0 and Q8_0
_OUTER = ("token_embd.weight", "output.weight")  # 8 bits in a file of 4, as in our plans


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    """Write the checkpoint's decoder and tokenizer; matrices as `kind`, of `FILE_TYPES`, by the package's own rounding.

    Raises `OutriderError` for a model whose rotation is scaled or a tokenizer that is no byte-level BPE.
    """
    opened = open_checkpoint(checkpoint)
    config = opened.config
    if config.rope_scaling.kind != "default":
        raise OutriderError(f"{checkpoint} scales its rotation ({config.rope_scaling.kind}), which is not written here")
    if config.family not in _ARCHITECTURES or config.windows:
        kinds = ", ".join(_ARCHITECTURES)
        raise OutriderError(f"{checkpoint} is a {config.family} model; {kinds} models without windows are written here")
    architecture = _ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(FILE_TYPES[kind])
    _add_geometry(writer, config)
    _add_tokenizer(writer, checkpoint, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    for name, tensor in _tensors(opened.tensors, config):
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise OutriderError(f"{checkpoint}: tensor {name!r} has no name in GGUF")
        stored = _type_of(known, tensor, kind)
        writer.add_tensor(known, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_geometry(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int) -> None:
    """Add the tokens, which no engine uses here, since it is given ids; but none loads without."""
    path = checkpoint / "tokenizer.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    model = found["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise OutriderError(f"{path} is no byte-level BPE, and others are not written here")
    tokens = [f"[unused {index}]" for index in range(vocab_size)]
    kinds = [TokenType.UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, TokenType.NORMAL
    for added in found["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


def _tensors(weights: TensorSource, config: DecoderConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for name in weights.found:
        if config.tie_embeddings and name == "lm_head.weight":
            continue
        tensor = weights.read(name).float().numpy()
        if _ARCHITECTURES[config.family] is gguf.MODEL_ARCH.LLAMA:
            tensor = _interleaved(name, tensor, config)
        yield name, tensor


def _interleaved(name: str, tensor: NDArray[np.float32], config: DecoderConfig) -> NDArray[np.float32]:
    """Order queries and keys as GGUF's llama has them: it rotates neighbours, Hugging Face's halves."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, config.head_dim // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _type_of(name: str, tensor: NDArray[np.float32], kind: str) -> GGMLQuantizationType:
    if tensor.ndim < 2 or tensor.shape[1] % _BLOCK:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType["Q8_0" if kind == "Q4_0" and name in _OUTER else kind]
