"""Small integers packed in words of 32 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unpack(words: NDArray[np.int32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Return the integers of `bits` bits in `words` `[A, B]`, lowest bits first, one after another along `axis`."""
    unsigned = np.ascontiguousarray(words if axis == 1 else words.T).view(np.uint32)
    mask, per = np.uint32((1 << bits) - 1), 32 // bits
    fields = np.empty((*unsigned.shape, per), np.uint8)
    for place in range(per):  # one place after another: all at once take four bytes for each integer
        fields[:, :, place] = unsigned >> np.uint32(bits * place) & mask
    integers = fields.reshape(len(unsigned), -1)
    return integers if axis == 1 else np.ascontiguousarray(integers.T)
