"""Scales of a product's inputs, folded into what makes them (AWQ: Lin et al., arXiv 2306.00978).

An input that is large on average makes the rounding errors of its weights large as well. Its weights are multiplied by
a scale and the input is divided by it, so that the errors become smaller beside the others of the block. The division
costs nothing: the norm or the product before does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.compiler.models.decoder import DecoderLayer, LayerConfig
from outrider.compiler.quantization.error_feedback import SHORT, feed_back
from outrider.compiler.quantization.moments import Moments
from outrider.plugins.quant_layout import BLOCK

_GRID = [step / 20 for step in range(20)]  # exponents of the mean magnitude; 0 scales nothing
_ROWS = 128  # outputs by which exponents are compared


@dataclass(frozen=True)
class Group:
    """Products of a layer that read one input, and the norm or product that makes it, by their names in the layer.

    A layer without that norm has products whose input nobody can scale."""

    products: tuple[str, ...]
    maker: str


GROUPS = (
    Group(("q", "k", "v"), "attention_norm"),
    Group(("o",), "v"),  # attention mixes tokens, and no dimension of a head with another
    Group(("gate", "up"), "mlp_norm"),
    Group(("down",), "up"),
)


def search_scales(weight: Tensor, moments: Moments, bits: int, copies: Sequence[int] = (1, 1)) -> Tensor:
    """Return the scales `[outputs of the maker]` by which weights f32 `[N, K]` lose least when they are rounded.

    Scales are powers of the inputs' mean magnitude; the exponent is searched. `copies` is (heads, copies): each of the
    maker's heads makes `copies` of the input's (`spread`).
    """
    rows = weight[:: -(-len(weight) // _ROWS)]
    heads, count = copies
    magnitudes = moments.magnitudes.view(heads, count, -1).mean(1).flatten().clamp(min=1e-8)
    best, least = torch.ones(len(magnitudes)), float("inf")
    for exponent in _GRID:
        scales = magnitudes**exponent
        scales = (scales / (scales.max() * scales.min()).sqrt()).float()
        inputs = spread(scales, copies)
        scaled, seen = rows * inputs, moments.divided(inputs)
        integers, steps = feed_back(scaled, seen, bits, SHORT)
        errors = scaled - integers * steps.repeat_interleave(BLOCK, dim=1)
        cost = float(seen.cost(errors).sum(dtype=torch.float64))
        if cost < least:
            best, least = scales, cost
    return best


def fold(layer: DecoderLayer, group: Group, scales: Tensor) -> None:
    """Multiply the weights of the group by `scales` and divide what makes their input, in place: nothing changes."""
    inputs = spread(scales, copies_of(layer.config, group))
    for name in group.products:
        getattr(layer, name).weight.mul_(inputs[:, None])
    maker = getattr(layer, group.maker)
    maker.weight.div_(scales)  # of a norm `[outputs]`, of a product `[inputs, outputs]`
    if getattr(maker, "bias", None) is not None:
        maker.bias.div_(scales)


def copies_of(config: LayerConfig, group: Group) -> tuple[int, int]:
    """Return how the group's input repeats what its maker makes: each KV head serves several query heads."""
    return (config.num_kv_heads, config.num_heads // config.num_kv_heads) if group.maker == "v" else (1, 1)


def spread(scales: Tensor, copies: Sequence[int]) -> Tensor:
    """Return the scales of the inputs `[K]`, given those of what makes them."""
    heads, count = copies
    return scales.view(heads, 1, -1).expand(-1, count, -1).flatten()
