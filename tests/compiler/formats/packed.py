"""Checkpoint folders with packed weights. AWQ, GPTQ and MXFP4 are written from the formats' descriptions,
compressed-tensors by its own package."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that stands in each place of a word, lowest bits first


@dataclass(frozen=True)
class Rounded:
    """Weights `[N, K]`: `scales * (integers - zeros)`. Scales, zeros are `[N, G]`; `groups` is each input's group."""

    integers: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float32]
    groups: NDArray[np.int64]

    @property
    def numbers(self) -> NDArray[np.float32]:
        steps = self.integers - self.zeros[:, self.groups]
        return (steps * self.scales[:, self.groups].astype(np.float64)).astype(np.float32)


def round_in_groups(
    weight: NDArray[np.float32], bits: int, size: int, *, symmetric: bool, groups: NDArray[np.int64] | None = None
) -> Rounded:
    """Round to the nearest of 2**bits steps; scales are float16."""
    outputs, inputs = weight.shape
    count = inputs // size
    groups = np.arange(inputs) // size if groups is None else groups
    most = 2**bits - 1
    zeros, scales = np.zeros((outputs, count), np.int64), np.zeros((outputs, count), np.float32)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = np.maximum(-low, high) / (most // 2) if symmetric else (high - low) / most
        scales[:, group] = scale.astype(np.float16)
        zeros[:, group] = (most + 1) // 2 if symmetric else np.clip(np.rint(-low / scales[:, group]), 0, most)
    integers = np.clip(np.rint(weight / scales[:, groups]) + zeros[:, groups], 0, most).astype(np.int64)
    return Rounded(integers, zeros, scales, groups)


def words(values: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Pack along the last axis, the first value in the lowest bits."""
    per = 32 // bits
    found = np.zeros((len(values), values.shape[1] // per), np.uint64)
    for place in range(per):
        found |= values[:, place::per].astype(np.uint64) << np.uint64(bits * place)
    return found.astype(np.uint32).view(np.int32)


def awq_tensors(made: Rounded) -> dict[str, NDArray[Any]]:
    def in_order(values: NDArray[np.int64]) -> NDArray[np.int64]:
        return values.reshape(len(values), -1, 8)[:, :, AWQ_ORDER].reshape(values.shape)

    return {
        "qweight": words(in_order(made.integers.T), 4),
        "qzeros": words(in_order(made.zeros.T), 4),
        "scales": made.scales.T.astype(np.float16),
    }


def gptq_tensors(made: Rounded, bits: int = 4, less_one: bool = True) -> dict[str, NDArray[Any]]:
    zeros = words(made.zeros.T, bits).view(np.uint32)
    ones = np.uint32(sum(1 << place for place in range(0, 32, bits)))
    return {
        "qweight": np.ascontiguousarray(words(made.integers, bits).T),
        "qzeros": (zeros - ones if less_one else zeros).view(np.int32),
        "scales": made.scales.T.astype(np.float16),
        "g_idx": made.groups.astype(np.int32),
    }


def compressed_tensors(
    weight: Tensor, bits: int, size: int | None, symmetric: bool, scale_type: torch.dtype = torch.float16
) -> tuple[dict[str, NDArray[Any] | Tensor], NDArray[np.float32]]:
    """The package's own tensors, and the numbers that it makes of them in float32.

    Without `size` there is one scale an output.
    """
    made = round_in_groups(weight.numpy(), bits, size or weight.shape[1], symmetric=symmetric)
    arguments = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group" if size else "channel", group_size=size
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    scale = torch.from_numpy(made.scales).to(scale_type)
    state = {
        "weight": weight.to(scale_type),
        "weight_scale": scale,
        "weight_zero_point": torch.from_numpy(made.zeros - 2 ** (bits - 1)).to(torch.int8),
    }
    found = PackedQuantizationCompressor.compress(state, scheme)
    wide = {name: part.float() if part.is_floating_point() else part for name, part in found.items()}
    numbers = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    return dict(found), numbers.numpy()


def compressed_settings(bits: int, size: int | None, symmetric: bool) -> dict[str, object]:
    """The `quantization_config` of such projections."""
    strategy = "group" if size else "channel"
    weights = {"num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


Pack = Callable[[str, Tensor], tuple[dict[str, Any], NDArray[np.float32]]]
"""From a projection's name and weights to its tensors by last part of name, and the numbers that they stand for."""


def write_packed(
    folder: Path, model: PreTrainedModel, pack: Pack, settings: dict[str, object], tokenizer: str | None = None
) -> None:
    """Save the model with its projections packed, and give it the numbers that they stand for: so it is the oracle."""
    model.save_pretrained(folder)
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight"):
            tensors[name] = parameter.detach().clone()
            continue
        found, numbers = pack(name, parameter.detach().float())
        parameter.data = torch.from_numpy(numbers)
        for last, part in found.items():
            held = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
            tensors[f"{name.removesuffix('.weight')}.{last}"] = held.contiguous()
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


BLOCK = 32
LARGEST = 6.0
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def rounded(weights: Tensor) -> Tensor:
    """Round the rows `[..., in]` so that MXFP4 keeps them: to two bits of mantissa below a block's largest power."""
    blocks = weights.unflatten(-1, (-1, BLOCK)).double()
    power = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2)
    magnitude = (blocks / power).abs().clamp(max=LARGEST)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return ((magnitude / step).round() * step * blocks.sign() * power).flatten(-2).float()


def mxfp4_parts(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks `[..., in / 32, 16]` and scales `[..., in / 32]` of numbers that `rounded` gave.

    Source: OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1.
    """
    blocks = weights.unflatten(-1, (-1, BLOCK)).double().numpy()
    exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    nibbles = np.vectorize(_nibble)(blocks / 2.0 ** exponents[..., None]).astype(np.uint8)
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return torch.from_numpy(pairs), torch.from_numpy((exponents + 127).astype(np.uint8))


def _nibble(number: float) -> int:
    """Encode one number: a sign, an exponent of bias 1, a bit of mantissa; the exponent 0 is subnormal."""
    sign, magnitude = int(np.signbit(number)), abs(number)
    exponent = 0 if magnitude < 1 else int(np.floor(np.log2(magnitude))) + 1
    mantissa = magnitude / 0.5 if exponent == 0 else (magnitude / 2 ** (exponent - 1) - 1) * 2
    assert mantissa in (0, 1), number
    return sign << 3 | exponent << 1 | int(mantissa)


def pack_experts(folder: Path) -> None:
    """Store experts of a checkpoint of gpt-oss as it is published, rounded to what MXFP4 keeps."""
    file, config = folder / "model.safetensors", folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": SETTINGS}))
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = mxfp4_parts(rounded(tensors.pop(name).transpose(1, 2)))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
