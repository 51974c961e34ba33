"""Integers and a scale for a block of weights, chosen by what their error does to the product's output.

Rounding to the nearest asks only how far each weight moves. Here an error e costs e^T M e, with M the second moments
of the block's inputs (`moments.py`). For given integers the best scale is a quotient, so the search is over integers:
those that a few scales round to, as llama.cpp's make_qx_quants does, and then single integers one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.plugins.quant_layout import BLOCK

_LIMITS = {4: (-8, 7), 8: (-127, 127)}  # the smallest and the largest integer, by bits


@dataclass(frozen=True)
class BlockSearch:
    """How long a block is searched.

    `steps` are tried for its largest weight, by bits: as many as the limit is rounding to the nearest, more clip
    weights. With 8 bits a clipped weight loses more than finer steps gain. `sweeps` go over the integers one by one.
    """

    steps: dict[int, tuple[float, ...]]
    sweeps: int


_CLIPPED = [0.85 + 0.03 * step for step in range(18)]
THOROUGH = BlockSearch({4: (-8, *(sign * 8 * g for g in _CLIPPED for sign in (-1, 1))), 8: (127,)}, sweeps=2)
SHORT = BlockSearch({4: (-8, -8.8, 8.8), 8: (127,)}, sweeps=0)
"""For comparing scales of inputs."""


def search_block(weights: Tensor, moments: Tensor, bits: int, search: BlockSearch) -> tuple[Tensor, Tensor]:
    """Return integers `[N, 32]` and scales `[N]`, as they are stored, of a block of `weights` `[N, 32]`.

    `moments` `[32, 32]` are those of its inputs. All are float32.
    """
    low, high = _LIMITS[bits]
    largest = weights.gather(1, weights.abs().argmax(1, keepdim=True))[:, 0]
    inverse = torch.where(largest == 0, 0, 1 / largest)
    aimed = weights @ moments
    best_gain, best = torch.full_like(largest, -1), torch.zeros_like(weights)
    for steps in search.steps[bits]:
        integers = (weights * (inverse * steps)[:, None]).round_().clamp_(low, high)
        dot, square = (integers * aimed).sum(1), (integers * (integers @ moments)).sum(1)
        gain = torch.where(square > 0, dot * dot / square, 0)  # by how much the best scale lowers the cost
        better = gain > best_gain
        best_gain, best = torch.where(better, gain, best_gain), torch.where(better[:, None], integers, best)
    scales = _best_scales(best, aimed, moments)
    for _ in range(search.sweeps):
        _sweep(best, scales, weights, moments, low, high)
        scales = _best_scales(best, aimed, moments)
    return best, scales


def _best_scales(integers: Tensor, aimed: Tensor, moments: Tensor) -> Tensor:
    """Return the scales of least cost, rounded to float16 as they are stored."""
    dot, square = (integers * aimed).sum(1), (integers * (integers @ moments)).sum(1)
    return torch.where(square > 0, dot / square, 0).half().float()


def _sweep(integers: Tensor, scales: Tensor, weights: Tensor, moments: Tensor, low: int, high: int) -> None:
    """Move each integer to where the cost is least while the others stay, in place, one after another."""
    pull = (weights - integers * scales[:, None]) @ moments
    inverse = torch.where(scales == 0, 0, 1 / scales)  # of a block of zeros no integer moves
    for i in range(BLOCK):
        move = (pull[:, i] * (inverse / moments[i, i])).round_()
        moved = (integers[:, i] + move).clamp_(low, high)
        pull -= ((moved - integers[:, i]) * scales)[:, None] * moments[i]
        integers[:, i] = moved
