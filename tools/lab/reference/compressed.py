"""Matrices of a draft head as integers, as llm-compressor writes them: compressed-tensors, pack-quantized.

A number is `scale * integer`, with a scale for each GROUP inputs. Scales are bfloat16, and numbers of float16 too, as
which kernels keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.compiler.block_checkpoint import stored_block_name
from outrider.compiler.eagle3_checkpoint import EMBEDDING
from outrider.compiler.quantization.rounding import in_steps, stored_scales
from outrider.plans.errors import CheckpointError

GROUP = 32
FLOAT = 16
"""Bits of projections that stay in bfloat16."""
USUAL = 8
"""Bits of the projections of a trained head, by default."""

_LARGEST = {4: (7.0, 7.5, 8.0), 8: (127.0,)}
"""Steps that the largest magnitude of a group may be, by bits: the one that rounds the group best is taken."""
_TABLES = (EMBEDDING, stored_block_name("markov.embedding"))
"""Matrices whose rows are looked up. With as few as 4 bits they stay as they are."""
_OTHERS = ("verifier_lm_head.weight",)
"""Matrices that no head multiplies with: what speculators trains against."""


@dataclass(frozen=True)
class Compressed:
    """A head's tensors by name, some projections `packed` into integers of `bits`.

    `settings` is the `quantization_config` of config.json. `error` is the largest difference that rounding made to a
    number, `worst` the name of its projection.
    """

    tensors: dict[str, Tensor]
    bits: int
    packed: tuple[str, ...]
    settings: dict[str, object]
    error: float
    worst: str


def compress(tensors: Mapping[str, Tensor], bits: int) -> Compressed:
    """Return a head's tensors with all projections packed into integers of `bits` whose inputs are a multiple of GROUP.

    Tables of tokens are as well, with USUAL bits. Norms, biases and maps stay as they are. With FLOAT bits everything
    does. Raises `CheckpointError`
    naming a projection that holds values that are not finite.
    """
    made = dict(tensors)
    packed, ignored, error, worst = [], [], 0.0, ""
    for name, tensor in tensors.items() if bits != FLOAT else ():
        if not is_packed(name, tuple(tensor.shape), bits) or not tensor.is_floating_point():
            continue
        module = name.removesuffix(".weight")
        if tensor.shape[1] % GROUP:
            ignored.append(module)
            continue
        weight = tensor.detach().float().cpu().numpy()
        if not np.isfinite(weight).all():
            raise CheckpointError(f"tensor {name!r} holds values that are not finite, which no integers stand for")
        integers, scales = _rounded(weight, bits)
        del made[name]
        made |= {
            f"{module}.weight_packed": torch.from_numpy(_words(integers, bits)),
            f"{module}.weight_scale": torch.from_numpy(scales).to(torch.bfloat16),
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
        packed.append(name)
        off = float(np.abs(integers * np.repeat(scales, GROUP, axis=1) - weight).max())
        if off >= error:
            error, worst = off, name
    tables = any(name in _TABLES for name in packed)
    return Compressed(made, bits, tuple(packed), _settings(bits, ignored, tables) if packed else {}, error, worst)


def is_packed(name: str, shape: tuple[int, ...], bits: int) -> bool:
    """Return whether a head's stored tensor is a matrix that is kept as integers, where its inputs allow it."""
    matrix = len(shape) == 2 and name.endswith(".weight") and name not in _OTHERS
    return matrix and (name not in _TABLES or bits == USUAL)


def stored_size(name: str, shape: tuple[int, ...], bits: int) -> int:
    """Return the bytes that `compress` and bfloat16 make of a stored tensor of floats."""
    numbers = prod(shape)
    if bits == FLOAT or not is_packed(name, shape, bits) or shape[1] % GROUP:
        return 2 * numbers
    return numbers * bits // 8 + 2 * numbers // GROUP + 16


def described(bits: int) -> str:
    """Return what the weights of a head of such bits are, as its card says it."""
    if bits == FLOAT:
        return "bf16"
    what = "projections and tables of tokens" if bits == USUAL else "projections"
    return f"{what} in int{bits} (rounded after training, a bf16 scale for {GROUP} inputs), the rest in bf16"


def _settings(bits: int, ignored: list[str], tables: bool) -> dict[str, object]:
    """Return the `quantization_config` that llm-compressor writes into config.json."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    targets = ["Linear", "Embedding"] if tables else ["Linear"]
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {"group_0": group},
    }


def _rounded(weight: NDArray[np.float32], bits: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round weights `[N, K]` to integers `[N, K]` and scales `[N, K / GROUP]`."""
    blocks = weight.reshape(len(weight), -1, GROUP)
    low = -(1 << (bits - 1))
    integers, scales = np.zeros(blocks.shape, np.int8), np.zeros(blocks.shape[:2], np.float32)
    least = np.full(blocks.shape[:2], np.inf, np.float32)
    for largest in _LARGEST[bits]:
        tried = (np.abs(blocks).max(axis=2) / np.float32(largest)).astype(ml_dtypes.bfloat16).astype(np.float32)
        tried = stored_scales(tried)  # moves those alone for which float16 has fewer bits
        steps = in_steps(blocks, tried, low, -low - 1)
        off = np.square(steps * tried[:, :, None] - blocks).sum(axis=2)
        better = off < least
        integers[better], scales[better], least[better] = steps[better], tried[better], off[better]
    return integers.reshape(weight.shape), scales


def _words(integers: NDArray[np.int8], bits: int) -> NDArray[np.int32]:
    """Pack integers `[N, K]` into words `[N, K * bits / 32]`: half of the range added, the first in the lowest bits."""
    unsigned = (integers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    places = unsigned.reshape(len(integers), -1, 32 // bits) << np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(places, axis=2)
    return words.view(np.int32)
