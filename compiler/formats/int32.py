"""Small integers packed in words of 32 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack(words: NDArray[np.int32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Return the integers of `bits` bits in `words` `[A, B]`, lowest bits first, one after another along `axis`."""
    unsigned = np.ascontiguousarray(words if axis == 1 else words.T).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = (unsigned[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    integers = fields.astype(np.uint8).reshape(len(unsigned), -1)
    return integers if axis == 1 else np.ascontiguousarray(integers.T)
