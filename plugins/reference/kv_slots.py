"""What a KV cache keeps of a key or value of one head, to the last bit; `plans.kv_slots` says how it lies in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from outrider.plans.kv_slots import SCALE_BYTES
from outrider.plugins.reference.quantize import Float32, quantize


def to_slots(x: Float32, dtype: DTypeLike) -> NDArray[Any]:
    """Return the slots `[..., slot_size]` of a cache of `dtype` that keep `x` `[..., head_dim]`.

    int8: the integers of `quantize`, and after them the bytes of their scale.
    """
    if np.dtype(dtype) != np.int8:
        return x.astype(dtype)
    integers, scales = quantize(x)
    return np.concatenate([integers, np.ascontiguousarray(scales).view(np.int8)], axis=-1)


def from_slots(slots: NDArray[Any]) -> Float32:
    """Return the numbers `[..., head_dim]` that slots `[..., slot_size]` stand for: of int8, integer times scale."""
    if slots.dtype != np.int8:
        return slots.astype(np.float32)
    scales = np.ascontiguousarray(slots[..., -SCALE_BYTES:]).view(np.float32)
    return slots[..., :-SCALE_BYTES].astype(np.float32) * scales
