"""compressed-tensors in the format pack-quantized, as llm-compressor writes it.

`weight_packed` int32 `[N, K * bits / 32]` has several inputs in a word, each signed integer with half of the range
added; `weight_scale` is `[N, G]`, or `[N, 1]` for whole outputs; `weight_zero_point`, where there is one, is int8
`[N, G]`, or packed like the weights, along the outputs; `weight_shape` is `[N, K]`. `weight_g_idx` int32 `[K]` gives
the group of each input, in any order with the activation ordering `group`; -1 stands for none.

`config_groups` of the configuration say the same of whole groups of projections, and must not contradict the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.compiler.formats.int32 import unpack
from outrider.compiler.formats.packed_module import SCALE_TYPES, PackedModule
from outrider.compiler.models.quantization import BITS, PATTERN, WeightGroup
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError

_WEIGHT, _SCALE, _ZERO, _SHAPE, _GROUPS = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
)
_CLASS = "Linear"


def _group_of(name: str, groups: Sequence[WeightGroup]) -> WeightGroup | None:
    """Return the group of a projection: one that has its name, else a pattern that matches it, else its class."""
    by_target = {target: group for group in groups for target in group.targets}
    patterns = sorted(target for target in by_target if target.startswith(PATTERN))
    matching = [pattern for pattern in patterns if re.match(pattern.removeprefix(PATTERN), name)]
    return next((by_target[target] for target in (name, *matching, _CLASS) if target in by_target), None)


class CompressedModule(PackedModule):
    """A projection in the format pack-quantized."""

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
        group = _group_of(self._name, groups)
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
        return unpack(self._read(_WEIGHT), self.bits, axis=1)[:, : self.shape[1]]

    def zeros(self) -> NDArray[np.uint8]:
        middle = 1 << (self.bits - 1)
        if _ZERO not in self._parts:
            return np.full((self.shape[0], self._count), middle, np.uint8)
        stored = self._read(_ZERO)
        if stored.dtype == np.int32:
            return unpack(stored, self.bits, axis=0)[: self.shape[0]]
        return (stored.astype(np.int16) + middle).astype(np.uint8)

    def scales(self) -> NDArray[np.float32]:
        return self._read_scales(_SCALE)

    def groups(self) -> NDArray[np.int64]:
        in_line = np.arange(self.shape[1]) // -(-self.shape[1] // self._count)
        if _GROUPS not in self._parts:
            return in_line
        return in_line if (self._read(_GROUPS) == -1).all() else self._read_groups(_GROUPS, self._count)
