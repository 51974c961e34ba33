"""Types of KV caches, and how a slot holds one head's key or value in each.

A slot of a float cache is the head's `head_dim` numbers. A slot of an int8 cache is `head_dim` integers and then the
bytes of their scale, a float32: each number is its integer times the scale. So a slot is one row of one type in every
cache, and moving slots is moving rows of any content.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.plans.buffers import DType

KvType = Literal["float32", "float16", "int8"]
"""The types that a recipe can ask for."""

SCALE_BYTES = 4
"""Bytes after the integers of an int8 slot: their scale, a float32 in the machine's byte order."""


def slot_size(dtype: DType, head_dim: int) -> int:
    """Return the elements of type `dtype` that a slot has for one head of `head_dim` numbers."""
    return head_dim + SCALE_BYTES if dtype is DType.INT8 else head_dim


def are_finite(slots: NDArray[Any]) -> bool:
    """Return whether slots `[..., size]` hold no infinity and no NaN, in numbers or in scales; bfloat16 is uint16."""
    if slots.dtype == np.int8:
        slots = np.ascontiguousarray(slots[..., -SCALE_BYTES:]).view(np.float32)
    if slots.dtype == np.uint16:
        return bool((slots & 0x7F80 != 0x7F80).all())
    return bool(np.isfinite(slots).all())
