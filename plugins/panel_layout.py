"""Float32 weights packed in the order in which our kernels on the CPU read them: panels of 16 outputs.

The C++ side is `FloatProduct` in `csrc/onnxruntime/kernels.h`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PANEL = 16
"""Outputs whose weights lie together, input after input."""


def panel_shape(matrices: int, inputs: int, outputs: int) -> tuple[int, int, int, int]:
    """Return the shape of packed matrices: `[matrices, panels, inputs, 16]`."""
    return matrices, -(-outputs // PANEL), inputs, PANEL


def pack_panels(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Pack matrices `[E, K, N]` into `[E, panels, K, 16]`; outputs that fill up the last panel are zeros."""
    matrices, inputs, outputs = weights.shape
    packed = np.zeros(panel_shape(matrices, inputs, outputs), np.float32)
    for matrix, into in zip(weights, packed, strict=True):  # one at a time, so that copies stay small
        for panel, columns in enumerate(into):
            part = matrix[:, panel * PANEL : (panel + 1) * PANEL]
            columns[:, : part.shape[1]] = part
    return packed
