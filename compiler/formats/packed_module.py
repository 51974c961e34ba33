"""A projection whose weights are integers in groups along its inputs, packed in several tensors of a checkpoint.

A number is `scale * (integer - zero)`, with a scale and a zero point for each output and group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.compiler.quantization.form import QuantizedWeight, WeightSource
from outrider.compiler.tensor_source import Stored, TensorSource
from outrider.plans.errors import CheckpointError
from outrider.plugins.quant_layout import BLOCK, fits_half

SCALE_TYPES = ("F16", "BF16", "F32")


class PackedModule(ABC):
    """One such projection, `[N, K]`: N outputs, K inputs, G groups. Its layout is checked when it is made.

    `parts` are the headers of its tensors by the last part of their names.
    """

    format: str
    """The format's name, as errors have it."""
    parts: tuple[str, ...]
    """The last parts of its tensors' names."""
    shape: tuple[int, int]
    bits: int

    def __init__(self, name: str, parts: Mapping[str, Stored], tensors: TensorSource) -> None:
        self._name, self._parts, self._tensors = name, parts, tensors

    @abstractmethod
    def integers(self) -> NDArray[np.uint8]:
        """Read the integers `[N, K]`."""

    @abstractmethod
    def zeros(self) -> NDArray[np.uint8]:
        """Read the zero points `[N, G]`."""

    @abstractmethod
    def scales(self) -> NDArray[np.float32]:
        """Read the scales `[N, G]`."""

    @abstractmethod
    def groups(self) -> NDArray[np.int64]:
        """Read the group `[K]` of each input."""

    @property
    def file(self) -> Path:
        """The file that holds the module's first tensor."""
        return next(iter(self._parts.values())).file

    @cached_property
    def order(self) -> NDArray[np.int64] | None:
        """The inputs `[K]`, group after group; None where they stand so already."""
        groups = self.groups()
        return None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable")

    @cached_property
    def has_form(self) -> bool:
        """Whether `QuantizedWeight` holds it, inputs reordered: each 32 of them are in one group."""
        groups = self.groups()
        if len(groups) % BLOCK:
            return False
        ordered = (groups if self.order is None else groups[self.order]).reshape(-1, BLOCK)
        return bool((ordered == ordered[:, :1]).all())

    def numbers(self) -> NDArray[np.float32]:
        """Return the weights `[N, K]`.

        The difference of integer and zero point has 9 bits at most and a scale of float16 11, so the product is exact.
        """
        groups = self.groups()
        steps = self.integers().astype(np.float32) - self.zeros().astype(np.float32)[:, groups]
        return steps * self.scales()[:, groups]

    def weight_source(self, outputs: NDArray[np.int64] | None, fold: bool) -> WeightSource | None:
        """Return the weights with their integers kept; None where they have no such form.

        `outputs` reorders the outputs. With `fold` the order of the inputs is made good elsewhere.

        A zero point becomes the minimum `-zero * scale`, exact in float32: it has 8 bits at most, and a scale of
        float16 or bfloat16 11. With a scale of float32 (24 bits) it is the nearest float32, off by half a unit in its
        last place. Where all zero points are half of the range the integers become signed, without minimums.
        """
        if not self.has_form:
            return None
        middle = 1 << (self.bits - 1)
        symmetric = bool((self.zeros() == middle).all())

        def read() -> QuantizedWeight:
            integers, groups = self.integers(), self.groups()
            if self.order is not None:
                integers, groups = integers[:, self.order], groups[self.order]
            if outputs is not None:
                integers = integers[outputs]

            def of_blocks(parts: NDArray[np.float32]) -> NDArray[np.float32]:
                return np.ascontiguousarray((parts if outputs is None else parts[outputs])[:, groups[::BLOCK]])

            if symmetric:
                signed = (integers - np.uint8(middle)).view(np.int8)  # modulo 256
                return QuantizedWeight(self.bits, signed, of_blocks(self.scales()))
            return QuantizedWeight(self.bits, integers, of_blocks(self.scales()), of_blocks(self._minimums()))

        wide = not fits_half(self.scales()) or not (symmetric or fits_half(self._minimums()))
        return WeightSource(self.bits, self.shape, not symmetric, read, wide, None if fold else self.order)

    def _minimums(self) -> NDArray[np.float32]:
        """Read the minimums `[N, G]`."""
        with np.errstate(over="ignore"):
            minimums = -(self.zeros().astype(np.float32) * self.scales())
        if not np.isfinite(minimums).all():
            raise CheckpointError(
                f"{self.file}: zero points of {self._name!r} times their scales are not finite in float32; "
                "the file is damaged"
            )
        return minimums

    def check_declared(self, declared: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` where the tensors contradict one of a `Packing`'s settings."""
        zeros, scales = "qzeros", self._parts["scales"].shape
        for key, value in declared.items():
            last = key.rpartition(".")[2]
            if last == "bits" and value != self.bits:
                raise self._wrong("qweight", f"has integers of {self.bits} bits, and {key} is {value!r}")
            if last == "group_size" and isinstance(value, int):
                size = value if value > 0 else self.shape[1]
                if scales[0] != -(-self.shape[1] // size):
                    raise self._wrong(
                        "scales", f"has {scales[0]} groups for {self.shape[1]} inputs, and {key} is {value}"
                    )
            middle = 1 << (self.bits - 1)
            if (last, value) in (("sym", True), ("zero_point", False)) and (self.zeros() != middle).any():
                other = int(next(each for each in self.zeros().flat if each != middle))
                raise self._wrong(
                    zeros,
                    f"has a zero point of {other}, and {key} is {str(value).lower()}, so that all are {middle}: "
                    "either the setting is wrong, or the one that says how zero points are stored (checkpoint_format)",
                )

    def _part(self, last: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Return the shape of one of the module's tensors."""
        stored = self._parts.get(last)
        if stored is None:
            raise CheckpointError(
                f"{self.file}: tensor {f'{self._name}.{last}'!r} is missing beside {', '.join(sorted(self._parts))}; "
                f"{self.format} needs it: give a complete checkpoint"
            )
        if stored.dtype not in dtypes:
            raise self._wrong(last, f"is stored as {stored.dtype}, expected {' or '.join(dtypes)}")
        if len(stored.shape) != (2 if shape is None else len(shape)) or shape not in (None, stored.shape):
            expected = "a matrix" if shape is None else f"{list(shape)}"
            raise self._wrong(last, f"has shape {list(stored.shape)}, expected {expected}")
        return stored.shape

    def _wrong(self, last: str, how: str) -> CheckpointError:
        return CheckpointError(
            f"{self._parts[last].file}: tensor {f'{self._name}.{last}'!r} of {self.format} {how}; "
            "give files that belong together"
        )

    def _read(self, last: str) -> NDArray[Any]:
        tensor = self._tensors.read(f"{self._name}.{last}")
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def _read_scales(self, last: str) -> NDArray[np.float32]:
        scales = self._read(last).astype(np.float32)
        if not np.isfinite(scales).all():
            raise self._wrong(last, "holds values that are not finite: the file is damaged")
        return scales

    def _read_groups(self, last: str, count: int) -> NDArray[np.int64]:
        groups = self._read(last).astype(np.int64)
        if groups.min() < 0 or groups.max() >= count:
            raise self._wrong(last, f"names groups from {groups.min()} to {groups.max()}, and there are {count}")
        return groups
