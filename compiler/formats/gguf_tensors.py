"""The tensors of a GGUF file under Hugging Face's names and in its layout."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.formats.gguf_blocks import BLOCK_TYPES
from outrider.compiler.formats.gguf_file import GgufFile
from outrider.compiler.models.config import DecoderConfig
from outrider.compiler.quantization.form import QuantizedWeight, WeightSource
from outrider.compiler.tensor_source import Stored
from outrider.plans.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; a part of the configuration, no weight."""

_OF_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_(q|k)\.(?:weight|bias)")
INTERLEAVED = "llama"
"""The architecture whose files store heads for a rotation of neighbours; the others' rotate halves, as we do."""


class GgufTensors:
    """The `TensorSource` of a GGUF file, whose decoder is `config`."""

    def __init__(self, file: GgufFile, config: DecoderConfig) -> None:
        self._file, self._config = file, config
        self._names: dict[str, str] = {}
        for own in file.tensors:
            name = _huggingface(own)
            if name is not None:
                self._names[name] = own
            elif own != ROPE_FACTORS:
                raise CheckpointError(
                    f"{file.path}: tensor {own!r} is unexpected: GGUF files of {config.family} models have none of "
                    "that name; give one that llama.cpp's converter made"
                )
        self.found = {
            name: Stored(file.path, tensor.shape, tensor.type, packed=tensor.type in BLOCK_TYPES)
            for name, own in self._names.items()
            for tensor in (file.tensors[own],)
        }

    def read(self, name: str) -> Tensor:
        """Read a tensor: floats in their type, blocks as float32."""
        own, stored = self._names[name], self.found[name]
        if stored.packed:
            numbers = BLOCK_TYPES[stored.dtype].numbers_of(self._rows(own)).reshape(stored.shape)
            return torch.from_numpy(numbers)
        found = self._file.numbers(own)
        order = self._order(own)
        found = found if order is None else found[order]
        return torch.from_numpy(found).view(torch.bfloat16) if stored.dtype == "BF16" else torch.from_numpy(found)

    def quantized(self, name: str) -> WeightSource | None:
        """Return a tensor of blocks with its integers and scales kept; None for floats, and for Q6_K, whose 16 numbers
        to a scale are no blocks of 32."""
        own, stored = self._names[name], self.found[name]
        block = BLOCK_TYPES.get(stored.dtype)
        if block is None or not block.has_form or len(stored.shape) != 2:
            return None

        def read() -> QuantizedWeight:
            made = block.quantized(self._rows(own))
            if not all(np.isfinite(part).all() for part in (made.scales, made.minimums) if part is not None):
                raise CheckpointError(
                    f"{stored.file}: tensor {own!r} has scales that are not finite; the file is damaged"
                )
            return made

        outputs, inputs = stored.shape
        return WeightSource(block.bits, (outputs, inputs), block.minimums, read, block.wide)

    def _rows(self, own: str) -> NDArray[np.uint8]:
        """Read the bytes of a tensor's rows. To reorder rows moves whole rows, so that no integer changes."""
        rows, order = self._file.rows(own), self._order(own)
        return rows if order is None else rows[order]

    def _order(self, own: str) -> NDArray[np.int64] | None:
        """Return the file's row for each of ours; None where they are the same."""
        rotated = _ROTATED.fullmatch(own)
        if rotated is None or self._file.metadata.get("general.architecture") != INTERLEAVED:
            return None
        c = self._config
        heads = c.num_heads if rotated[1] == "q" else c.num_kv_heads
        rows = np.arange(self._file.tensors[own].shape[0])
        if rows.size != heads * c.head_dim:
            return None  # the shape is wrong, which the check of all tensors says
        # The file has the rotated pairs (i, i + half) of a head side by side.
        return rows.reshape(heads, c.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _huggingface(own: str) -> str | None:
    """Return Hugging Face's name for a tensor, of each another one; None for an unknown tensor."""
    matched = _LAYER_TENSOR.fullmatch(own)
    if matched is None or matched[2] not in _OF_LAYER:
        return _OF_MODEL.get(own)
    return f"model.layers.{matched[1]}.{_OF_LAYER[matched[2]]}.{matched[3]}"
