"""Layouts of packed projections: AWQ, GPTQ and compressed-tensors, each as the tool that writes it has it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.formats.packed_module import SCALE_TYPES, PackedModule
from outrider.compiler.models.quantization import BITS, PATTERN, WeightGroup
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError

_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # of AWQ's eight outputs of a word, counted from its lowest bits
_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
"""A one in each place of a word, by bits."""
_WEIGHT, _SCALE, _ZERO = "weight_packed", "weight_scale", "weight_zero_point"
_SHAPE, _GROUPS = "weight_shape", "weight_g_idx"


def _unpack(words: NDArray[np.int32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Return the integers of `bits` bits in `words` `[A, B]`, lowest bits first, one after another along `axis`."""
    unsigned = np.ascontiguousarray(words if axis == 1 else words.T).view(np.uint32)
    mask, per = np.uint32((1 << bits) - 1), 32 // bits
    fields = np.empty((*unsigned.shape, per), np.uint8)
    for place in range(per):  # one place after another: all at once take four bytes for each integer
        fields[:, :, place] = unsigned >> np.uint32(bits * place) & mask
    integers = fields.reshape(len(unsigned), -1)
    return integers if axis == 1 else np.ascontiguousarray(integers.T)


class AwqModule(PackedModule):
    """AWQ's gemm layout, as AutoAWQ writes it.

    `qweight` int32 `[K, N / 8]` and `qzeros` int32 `[G, N / 8]` have eight outputs in a word, in an order that suits
    unpacking on a GPU; `scales` is `[G, N]`.
    """

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
        return self._unpacked("qweight")

    def zeros(self) -> NDArray[np.uint8]:
        return self._unpacked("qzeros")

    def _unpacked(self, last: str) -> NDArray[np.uint8]:
        found = _unpack(self._read(last), self.bits, axis=1)
        return np.ascontiguousarray(found.reshape(len(found), -1, 8)[:, :, _PLACES].reshape(found.shape).T)

    def scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._read_scales("scales").T)

    def groups(self) -> NDArray[np.int64]:
        return np.arange(self.shape[1]) // self._size


class GptqModule(PackedModule):
    """GPTQ's layout of the second version, whose zero points are stored as they are.

    `qweight` int32 `[K * bits / 32, N]` has several inputs in a word, `qzeros` int32 `[G, N * bits / 32]` several
    outputs; `scales` is `[G, N]`, and `g_idx` int32 `[K]` the group of each input, in any order where the model was
    quantised by descending activations (`desc_act`).
    """

    format = "GPTQ"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, name: str, parts: Mapping[str, Stored], tensors: TensorSource) -> None:
        super().__init__(name, parts, tensors)
        rows, outputs = self._part("qweight", ("I32",))
        count, words = self._part("qzeros", ("I32",))
        self.bits = words * 32 // max(outputs, 1)
        if self.bits not in BITS:
            raise self._wrong("qzeros", f"has integers of {self.bits} bits; those of 4 and 8 are read")
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
        return np.ascontiguousarray(_unpack(self._read("qweight"), self.bits, axis=0).T)

    def zeros(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(_unpack(self._zero_words(), self.bits, axis=1).T)

    def scales(self) -> NDArray[np.float32]:
        return np.ascontiguousarray(self._read_scales("scales").T)

    def groups(self) -> NDArray[np.int64]:
        if "g_idx" in self._parts:
            return self._read_groups("g_idx", self._count)
        return np.arange(self.shape[1]) // (self.shape[1] // self._count)

    def _zero_words(self) -> NDArray[np.int32]:
        return self._read("qzeros")


class FirstGptqModule(GptqModule):
    """GPTQ's first layout, whose zero points are stored less one.

    The ones are added to whole words, as GPTQModel takes them off: a zero point of 0 borrows from its neighbour. Where
    no zero point is 0 this is AutoGPTQ's `(stored + 1) & 15` in each place, and AutoGPTQ's own writer spoils the word
    of a zero point of 0, so that GPTQModel alone says what such a word means.
    """

    def _zero_words(self) -> NDArray[np.int32]:
        return (super()._zero_words().view(np.uint32) + _ONES[self.bits]).view(np.int32)


class CompressedModule(PackedModule):
    """compressed-tensors in the format pack-quantized, as llm-compressor writes it.

    `weight_packed` int32 `[N, K * bits / 32]` has several inputs in a word, each signed integer with half of the range
    added; `weight_scale` is `[N, G]`, or `[N, 1]` for whole outputs; `weight_zero_point`, where there is one, is int8
    `[N, G]`, or packed like the weights, along the outputs; `weight_shape` is `[N, K]`. `weight_g_idx` int32 `[K]`
    gives the group of each input, in any order with the activation ordering `group`; -1 stands for none.
    """

    format = "compressed-tensors"
    parts = (_WEIGHT, _SCALE, _ZERO, _SHAPE, _GROUPS)

    def __init__(self, name: str, parts: Mapping[str, Stored], tensors: TensorSource) -> None:
        super().__init__(name, parts, tensors)
        rows, words = self._part(_WEIGHT, ("I32",))
        self._part(_SHAPE, ("I64", "I32"), (2,))
        outputs, inputs = (int(size) for size in self._read(_SHAPE))
        self.bits = next((bits for bits in BITS if -(-inputs * bits // 32) == words), 0)
        if rows != outputs or not self.bits:
            raise self._wrong(
                _WEIGHT, f"has shape {[rows, words]}, which holds no {[outputs, inputs]} integers of 4 or 8 bits"
            )
        scaled, count = self._part(_SCALE, SCALE_TYPES)
        if scaled != outputs or not count or (inputs % count and _GROUPS not in parts):
            raise self._wrong(
                _SCALE, f"has shape {[scaled, count]}, which does not fit {outputs} outputs of {inputs} inputs"
            )
        if _GROUPS in parts:
            self._part(_GROUPS, ("I32",), (inputs,))
        if _ZERO in parts:
            packed = parts[_ZERO].dtype == "I32"
            self._part(_ZERO, ("I8", "I32"), (-(-outputs * self.bits // 32) if packed else outputs, count))
        self.shape, self._count = (outputs, inputs), count

    def check(self, groups: Sequence[WeightGroup]) -> None:
        """Raise `CheckpointError` where the tensors are not as the projection's group says."""
        # A group that has the projection's name, else a pattern that matches it, else its class.
        by_target = {target: group for group in groups for target in group.targets}
        patterns = sorted(target for target in by_target if target.startswith(PATTERN))
        matching = [pattern for pattern in patterns if re.match(pattern.removeprefix(PATTERN), self._name)]
        group = next((by_target[each] for each in (self._name, *matching, "Linear") if each in by_target), None)
        if group is None:
            return
        if self.bits != group.bits:
            raise self._wrong(_WEIGHT, f"has integers of {self.bits} bits, and {group.key} has {group.bits}")
        if group.size is not None and self._count != -(-self.shape[1] // group.size):
            raise self._wrong(
                _SCALE,
                f"has {self._count} groups for {self.shape[1]} inputs, and those of {group.key} have {group.size}",
            )
        if not group.symmetric and _ZERO not in self._parts:
            raise CheckpointError(
                f"{self.file}: tensor {f'{self._name}.{_ZERO}'!r} is missing, and {group.key} is not symmetric; "
                "give a complete checkpoint"
            )
        if group.symmetric and _ZERO in self._parts and (self.zeros() != 1 << (self.bits - 1)).any():
            raise self._wrong(_ZERO, f"has zero points, and {group.key} is symmetric")

    def integers(self) -> NDArray[np.uint8]:
        return _unpack(self._read(_WEIGHT), self.bits, axis=1)[:, : self.shape[1]]

    def zeros(self) -> NDArray[np.uint8]:
        middle = 1 << (self.bits - 1)
        if _ZERO not in self._parts:
            return np.full((self.shape[0], self._count), middle, np.uint8)
        stored = self._read(_ZERO)
        if stored.dtype == np.int32:
            return _unpack(stored, self.bits, axis=0)[: self.shape[0]]
        return (stored.astype(np.int16) + middle).astype(np.uint8)

    def scales(self) -> NDArray[np.float32]:
        return self._read_scales(_SCALE)

    def groups(self) -> NDArray[np.int64]:
        in_line = np.arange(self.shape[1]) // -(-self.shape[1] // self._count)
        if _GROUPS not in self._parts:
            return in_line
        return in_line if (self._read(_GROUPS) == -1).all() else self._read_groups(_GROUPS, self._count)
