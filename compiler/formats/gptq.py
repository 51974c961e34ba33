"""GPTQ, as AutoGPTQ and GPTQModel write it.

`qweight` int32 `[K * bits / 32, N]` has several inputs in a word, `qzeros` int32 `[G, N * bits / 32]` several outputs;
`scales` is `[G, N]`, and `g_idx` int32 `[K]` the group of each input, in any order where the model was quantised by
descending activations (`desc_act`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.formats.int32 import unpack
from outrider.compiler.formats.packed_module import SCALE_TYPES, PackedModule
from outrider.compiler.tensor_source import Stored, TensorSource

_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""A one in each place of a word, by bits."""


class GptqModule(PackedModule):
    """A projection in GPTQ's layout of the second version, whose zero points are stored as they are."""

    format = "GPTQ"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, name: str, parts: Mapping[str, Stored], tensors: TensorSource) -> None:
        super().__init__(name, parts, tensors)
        rows, outputs = self._part("qweight", ("I32",))
        count, words = self._part("qzeros", ("I32",))
        self.bits = words * 32 // max(outputs, 1)
        self._check_bits("qzeros")
        inputs = rows * 32 // self.bits
        self._part("qzeros", ("I32",), (count, outputs * self.bits // 32))
        self._part("scales", SCALE_TYPES, (count, outputs))
        if "g_idx" in parts:
            self._part("g_idx", ("I32",), (inputs,))
        elif not count or inputs % count:
            raise self._wrong(
                "scales", f"has {count} groups for {inputs} inputs, and there is no g_idx that parts them"
            )
        self.shape, self._count = (outputs, inputs), count

    def integers(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(unpack(self._read("qweight"), self.bits, axis=0).T)

    def zeros(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(unpack(self._zero_words(), self.bits, axis=1).T)

    def scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._read_scales("scales").T)

    def groups(self) -> NDArray[np.int64]:
        if "g_idx" in self._parts:
            return self._read_groups("g_idx", self._count)
        return np.arange(self.shape[1]) // (self.shape[1] // self._count)

    def _zero_words(self) -> NDArray[np.int32]:
        words: NDArray[np.int32] = self._read("qzeros")
        return words


class FirstGptqModule(GptqModule):
    """A projection in GPTQ's first layout, whose zero points are stored less one.

    The ones are added to whole words, as GPTQModel takes them off: a zero point of 0 borrows from its neighbour. Where
    no zero point is 0 this is AutoGPTQ's `(stored + 1) & 15` in each place, and AutoGPTQ's own writer spoils the word
    of a zero point of 0, so that GPTQModel alone says what such a word means.
    """

    def _zero_words(self) -> NDArray[np.int32]:
        return (super()._zero_words().view(np.uint32) + _ONES[self.bits]).view(np.int32)
