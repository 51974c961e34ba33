"""What a KV cache keeps of a key or value of one head, to the last bit; `plans.kv_slots` says how it lies in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from plans.kv_slots import SCALE_BYTES

_TINY = np.float32(2.0**-100)

Float32 = NDArray[np.float32]


def to_slots(x: Float32, dtype: DTypeLike) -> NDArray[Any]:
    """Return the slots `[..., slot_size]` of a cache of `dtype` that keep `x` `[..., head_dim]`.

    int8: scale = max|x| / 127, integers = x * (127 / max|x|) in float32, rounded to the nearest, halves to even. Where
    all numbers are below 2^-100 they are kept as zeros; where one is an infinity or a NaN the scale is NaN.
    """
    if np.dtype(dtype) != np.int8:
        return x.astype(dtype)
    most = np.abs(x).max(axis=-1, keepdims=True)  # NaN where one is
    usable = np.isfinite(most) & (most >= _TINY)
    safe = np.where(usable, most, np.float32(1))
    steps = np.where(usable, x, np.float32(0)) * (np.float32(127) / safe)
    scales = np.where(usable, safe / np.float32(127), np.float32(0))
    scales = np.where(np.isfinite(most), scales, np.float32(np.nan)).astype(np.float32)
    return np.concatenate([np.rint(steps).astype(np.int8), np.ascontiguousarray(scales).view(np.int8)], axis=-1)


def from_slots(slots: NDArray[Any]) -> Float32:
    """Return the numbers `[..., head_dim]` that slots `[..., slot_size]` stand for: of int8, integer times scale."""
    if slots.dtype != np.int8:
        return slots.astype(np.float32)
    scales = np.ascontiguousarray(slots[..., -SCALE_BYTES:]).view(np.float32)
    return slots[..., :-SCALE_BYTES].astype(np.float32) * scales
