"""Arithmetic in float32 of the kernels for ONNX Runtime on the CPU, to the last bit."""

from __future__ import annotations

import numpy as np

from outrider.plugins.reference.quant_matmul import fma
from outrider.plugins.reference.quantize import Float32

_LOWEST = np.float32(-87)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_TAYLOR = [np.float32(1) / np.float32(factorial) for factorial in (720, 120, 24, 6, 2, 1, 1)]


def ordered_matmul(x: Float32, weight: Float32) -> Float32:
    """Return x `[N, K]` @ weight `[K, M]`, summed over K in ascending order by fused multiply-adds."""
    total = np.zeros((len(x), weight.shape[1]), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for column, row in zip(x.T, weight, strict=True):
            total = fma(np.broadcast_to(column[:, None], total.shape), np.broadcast_to(row, total.shape), total)
    return total


def lanes_exp(x: Float32) -> Float32:
    """Return exp of numbers up to 0; 0 below -87, NaN of NaN."""
    bounded = np.where(x >= _LOWEST, x, _LOWEST)
    n = np.rint(bounded * _LOG2E)
    r = fma(-n, np.full_like(n, _LN2_LOW), fma(-n, np.full_like(n, _LN2_HIGH), bounded))
    p = np.full_like(r, _TAYLOR[0])
    for term in _TAYLOR[1:]:
        p = fma(p, r, np.full_like(r, term))
    return np.where(np.isnan(x), x, np.where(x < _LOWEST, np.float32(0), np.ldexp(p, n.astype(np.int32))))


def lanes_softplus(x: Float32) -> Float32:
    """Return log(1 + exp(x)): max(x, 0) + 2 (z + z^3 / 3 + ... + z^17 / 17), z = y / (2 + y), y = exp(-|x|)."""
    y = lanes_exp(-np.abs(x))
    z = y / (np.float32(2) + y)
    squared, series = z * z, np.full_like(z, np.float32(1) / np.float32(17))
    for odd in range(15, 0, -2):
        series = fma(series, squared, np.full_like(z, np.float32(1) / np.float32(odd)))
    return fma(z + z, series, np.where(x < 0, np.float32(0), x))


def lanes_sum(x: Float32, y: Float32) -> Float32:
    """Return the sums of x * y over the last dimension: in sixteen lanes, each ascending, which are then added in
    quarters, (0 + 2) + (1 + 3), and the quarters likewise."""
    more = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)]
    rows, columns = np.pad(x, more), np.pad(y, more)
    lanes = np.zeros((*x.shape[:-1], 16), np.float32)
    for first in range(0, rows.shape[-1], 16):
        lanes = fma(rows[..., first : first + 16], columns[..., first : first + 16], lanes)
    quarters = lanes.reshape(*x.shape[:-1], 4, 4)
    quarters = (quarters[..., 0] + quarters[..., 2]) + (quarters[..., 1] + quarters[..., 3])
    total: Float32 = (quarters[..., 0] + quarters[..., 2]) + (quarters[..., 1] + quarters[..., 3])
    return total


def sigmoid(x: Float32) -> Float32:
    return _opened(np.ones_like(x), x)


def gated_unit(gate: Float32, up: Float32) -> Float32:
    """Return `silu(gate) * up`."""
    return _opened(gate, gate) * up


def clamped_unit(gate: Float32, up: Float32, *, alpha: float, limit: float) -> Float32:
    """Return `(up + 1) * gate * sigmoid(alpha * gate)`, with gate at most `limit` and up from -limit to limit."""
    most = np.float32(limit)
    low, both = np.minimum(gate, most), np.clip(up, -most, most)
    gated: Float32 = (both + np.float32(1)) * _opened(low, np.float32(alpha) * low)
    return gated


def _opened(gate: Float32, x: Float32) -> Float32:
    """Return `gate * sigmoid(x)`."""
    least = lanes_exp(-np.abs(x))
    with np.errstate(invalid="ignore"):
        opened: Float32 = gate * (np.where(x < 0, least, np.float32(1)) / (np.float32(1) + least))
    return opened
