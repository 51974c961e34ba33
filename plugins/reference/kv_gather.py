"""Compact rows of a KV arena in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def kv_gather(kv: NDArray[Any], source: NDArray[np.int64], source_base: int, destination: int) -> None:
    """Row source_base + source[i] -> row destination + i of `kv` `[planes, heads, capacity, head_dim]`, i ascending."""
    for i, row in enumerate(source.tolist()):
        kv[:, :, destination + i] = kv[:, :, source_base + row]
