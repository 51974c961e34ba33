"""Round a matrix block by block, and let the weights after a block make up for its errors.

The errors of a block of inputs can be made up for in part by changing weights of inputs that go along with them; the
best change is linear in the errors (Frantar et al., GPTQ, arXiv 2210.17323, there for one input at a time). So a block
is judged by what is left once the weights after it, in its window of the moments, have made up for its errors: the
Schur complement of its moments. With U the root of the window (`moments.py`) that is (U_b^T U_b)^-1 for block b, and
errors e change the weights after by e U_b^-1 U_b,rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from outrider.compiler.quantization.block_search import THOROUGH, BlockSearch, search_block
from outrider.compiler.quantization.form import QuantizedWeight, stack
from outrider.compiler.quantization.moments import WINDOW, Moments
from outrider.compiler.quantization.rounding import round_to_nearest
from outrider.plugins.quant_layout import BLOCK
from outrider.plugins.reference import dequantize

_ROWS = 4096  # outputs rounded at once; threads share these out


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
            behind = slice(at.stop, start + len(root))
            block, complement = left[:, at].contiguous(), torch.cholesky_inverse(root[own, own], upper=True).float()
            integers[:, at], scale = search_block(block, complement, bits, search)
            scales[:, at.start // BLOCK] = scale
            change = torch.linalg.solve_triangular(root[own, own], root[own, rest], upper=True).float()
            left[:, behind] -= (block - integers[:, at] * scale[:, None]) @ change
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
