"""Numbers that share a scale, as integers of 8 bits, to the last bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TINY = np.float32(2.0**-100)

Float32 = NDArray[np.float32]


def quantize(x: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Quantise `x` `[..., size]`, whose last dimension shares a scale: integers in -127..127, and scales `[..., 1]`.

    scale = max|x| / 127, integer = x * (127 / max|x|) in float32, rounded to the nearest, halves to even. Where all
    numbers are below 2^-100 they count as zeros; where one is an infinity or a NaN the scale is NaN.
    """
    most = np.abs(x).max(axis=-1, keepdims=True)  # NaN where one is
    usable = np.isfinite(most) & (most >= _TINY)
    safe = np.where(usable, most, np.float32(1))
    steps = np.where(usable, x, np.float32(0)) * (np.float32(127) / safe)
    scales = np.where(usable, safe / np.float32(127), np.float32(0))
    scales = np.where(np.isfinite(most), scales, np.float32(np.nan)).astype(np.float32)
    return np.rint(steps).astype(np.int8), scales
