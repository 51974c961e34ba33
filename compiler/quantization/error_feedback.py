"""Round a matrix block by block, and let the weights after a block make up for its errors.

The errors of a block of inputs can be made up for in part by changing weights of inputs that go along with them; the
best change is linear in the errors (Frantar et al., GPTQ, arXiv 2210.17323, there for one input at a time). So a block
is judged by what is left once the weights after it, in its window of the moments, have made up for its errors: the
Schur complement of its moments. With U the root of the window (`moments.py`) that is (U_b^T U_b)^-1 for block b, and
errors e change the weights after by e U_b^-1 U_b,rest.

Rounding a block to the nearest asks only how far each weight moves. Here an error e costs e^T M e, with M the second
moments of the block's inputs. For given integers the best scale is a quotient, so the search is over integers: those
that a few scales round to, as llama.cpp's make_qx_quants does, and then single integers one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.compiler.quantization.form import QuantizedWeight, stack
from outrider.compiler.quantization.moments import WINDOW, Moments
from outrider.compiler.quantization.rounding import integer_limits, round_to_nearest
from outrider.plugins.quant_layout import BLOCK
from outrider.plugins.reference import dequantize

_ROWS = 4096  # outputs rounded at once; threads share these out


@dataclass(frozen=True)
class BlockSearch:
    """How long a block is searched.

    `steps` are tried for its largest weight, by bits: those of the limit round to the nearest, more clip
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
    low, high = integer_limits(bits)
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


def round_with_feedback(weight: Tensor, moments: Moments, bits: int) -> QuantizedWeight:
    """Round `weight` f32 `[N, K]`, whose inputs have these moments, so that its outputs move little.

    No output moves more than with `round_to_nearest`: where it would, it is rounded so.
    """
    threads = torch.get_num_threads()
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return stack(list(pool.map(lambda rows: _round_rows(rows, moments, bits), torch.split(weight, _ROWS))))


def feed_back(weight: Tensor, moments: Moments, bits: int, search: BlockSearch) -> tuple[Tensor, Tensor]:
    """Return integers f32 `[N, K]` and scales `[N, K / 32]` of `weight`."""
    left = weight.clone()  # the weights, and what they make up for
    integers, scales = torch.empty_like(weight), torch.empty(len(weight), weight.shape[1] // BLOCK)
    for window, root in enumerate(moments.roots):
        start = window * WINDOW
        for first in range(0, len(root), BLOCK):
            own, rest = slice(first, first + BLOCK), slice(first + BLOCK, None)
            at = slice(start + first, start + first + BLOCK)
            after = slice(at.stop, start + len(root))
            block, complement = left[:, at].contiguous(), torch.cholesky_inverse(root[own, own], upper=True).float()
            integers[:, at], scale = search_block(block, complement, bits, search)
            scales[:, at.start // BLOCK] = scale
            change = torch.linalg.solve_triangular(root[own, own], root[own, rest], upper=True).float()
            left[:, after] -= (block - integers[:, at] * scale[:, None]) @ change
    return integers, scales


def numbers(weight: QuantizedWeight) -> Tensor:
    """Return the weights f32 `[N, K]` that integers and scales stand for."""
    return torch.from_numpy(dequantize(weight.integers, weight.scales, weight.minimums))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch's operators in one thread each: those on a block are too small to share out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round_rows(weight: Tensor, moments: Moments, bits: int) -> QuantizedWeight:
    integers, scales = feed_back(weight, moments, bits, THOROUGH)
    made = QuantizedWeight(bits, integers.to(torch.int8).numpy(), scales.numpy())
    nearest = round_to_nearest(weight.numpy(), bits)
    worse = (moments.cost(weight - numbers(made)) > moments.cost(weight - numbers(nearest))).numpy()[:, None]
    return QuantizedWeight(
        bits, np.where(worse, nearest.integers, made.integers), np.where(worse, nearest.scales, made.scales)
    )
