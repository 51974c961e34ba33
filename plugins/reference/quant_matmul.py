"""Products of quantised rows with quantised weights, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.reference.quantize import Float32, quantize

_BLOCK = 32


def quantize_rows(x: Float32) -> tuple[NDArray[np.int32], Float32]:
    """Quantise rows `[M, K]` block by block: integers `[M, K / 32, 32]` in -127..127, and scales `[M, K / 32]`."""
    integers, scales = quantize(x.reshape(len(x), -1, _BLOCK))
    return integers.astype(np.int32), scales[:, :, 0]


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return `a * b + c` with one rounding to float32.

    The product is exact in float64. Its sum with c is rounded to odd there, so that rounding it again to float32 does
    not see a tie that is none.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (error != 0) & even, towards, total).astype(np.float32)


def quant_matmul(x: Float32, integers: NDArray[Any], scales: Float32, minimums: Float32 | None = None) -> Float32:
    """Return x `[M, K]` times the transpose of weights `[N, K]` with scales (and minimums) `[N, K / 32]`: `[M, N]`.

    A block's sum is an integer. Blocks are added in ascending order: `sum = fma(integer sum, scale of the weights *
    scale of the row, sum)`, and then with minimums `sum = fma(minimum, scale of the row * sum of its integers, sum)`.
    """
    rows, row_scales = quantize_rows(x)
    outputs, count = len(integers), scales.shape[1]
    weights = integers.astype(np.int32).reshape(outputs, count, _BLOCK)
    total = np.zeros((len(x), outputs), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for block in range(count):
            products = (rows[:, block] @ weights[:, block].T).astype(np.float32)
            total = fma(products, scales[:, block] * row_scales[:, block, None], total)
            if minimums is not None:
                sums = row_scales[:, block] * rows[:, block].sum(axis=1).astype(np.float32)
                total = fma(np.broadcast_to(minimums[:, block], total.shape), sums[:, None], total)
    return total


def dequantize(integers: NDArray[Any], scales: Float32, minimums: Float32 | None = None) -> Float32:
    """Return the weights `[N, K]` that integers, scales and minimums stand for, in float32."""
    blocks = integers.astype(np.float32).reshape(*scales.shape, _BLOCK) * scales[:, :, None]
    if minimums is not None:
        blocks = blocks + minimums[:, :, None]
    return np.ascontiguousarray(blocks.reshape(integers.shape), np.float32)
