"""AWQ in the gemm layout, as AutoAWQ writes it.

`qweight` int32 `[K, N / 8]` and `qzeros` int32 `[G, N / 8]` have eight outputs in a word, in an order that suits
unpacking on a GPU; `scales` is `[G, N]`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.formats.int32 import unpack
from outrider.compiler.formats.packed_module import SCALE_TYPES, PackedModule
from outrider.compiler.tensor_source import Stored, TensorSource

_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of the eight outputs of a word, counted from its lowest bits


class AwqModule(PackedModule):
    """A projection in AWQ's gemm layout."""

    format = "AWQ"
    parts = ("qweight", "qzeros", "scales")
    bits = 4

    def __init__(self, name: str, parts: Mapping[str, Stored], tensors: TensorSource) -> None:
        super().__init__(name, parts, tensors)
        inputs, words = self._part("qweight", ("I32",))
        count, outputs = self._part("scales", SCALE_TYPES)
        if outputs != words * 8 or not count or inputs % count:
            raise self._wrong(
                "scales", f"has shape {[count, outputs]}, which does not fit {inputs} inputs and {words * 8} outputs"
            )
        self._part("qzeros", ("I32",), (count, words))
        self.shape, self._size = (outputs, inputs), inputs // count

    def integers(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(_in_order(unpack(self._read("qweight"), self.bits, axis=1)).T)

    def zeros(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(_in_order(unpack(self._read("qzeros"), self.bits, axis=1)).T)

    def scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._read_scales("scales").T)

    def groups(self) -> NDArray[np.int64]:
        return np.arange(self.shape[1]) // self._size


def _in_order(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return integers.reshape(len(integers), -1, 8)[:, :, _PLACES].reshape(integers.shape)
