"""Heads on disk whose projections the package compressed-tensors packs."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .eagle3_heads import change, change_config
from .formats.packed import compressed_settings, compressed_tensors

TABLES = ("embed_tokens.weight", "markov_head.markov_w1.weight", "verifier_lm_head.weight")


def pack_head(
    folder: Path, bits: int = 8, size: int | None = 32, symmetric: bool = True, left: Set[str] = frozenset()
) -> dict[str, Tensor]:
    """Pack all projections of a head but those `left`, in place; return the numbers of its tensors by their names
    before.

    Groups have `size` inputs, or are whole rows.
    """
    found: dict[str, Tensor] = {}

    def pack(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            found[name] = tensor
            if tensor.ndim != 2 or name in TABLES or name in left:
                continue
            parts, numbers = compressed_tensors(tensor.float(), bits, size, symmetric, torch.bfloat16)
            found[name] = torch.from_numpy(np.ascontiguousarray(numbers))
            del tensors[name]
            for last, part in parts.items():
                held = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
                tensors[f"{name.removesuffix('.weight')}.{last}"] = held.contiguous()

    change(folder, pack)
    ignored = [name.removesuffix(".weight") for name in sorted(left)]
    change_config(folder, quantization_config=compressed_settings(bits, size, symmetric) | {"ignore": ignored})
    return found
