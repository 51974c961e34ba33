"""A packer of MXFP4, from the format's definition, and numbers that it keeps exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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


def packed(weights: Tensor) -> tuple[Tensor, Tensor]:
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
        blocks, scales = packed(rounded(tensors.pop(name).transpose(1, 2)))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
