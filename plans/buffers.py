"""Tensors as the contract describes them: dtype, and a shape of numbers and symbols."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import prod
from typing import Annotated

import numpy as np
from numpy.typing import DTypeLike
from pydantic import BaseModel, ConfigDict, Field

LARGEST_SIZE = 2**24  # tokens, vocabulary entries, heads ...: far above any model, far below what overflows

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
"""A name that is also a file name: small letters, digits, and `-_.` after the first character."""

Dimension = Annotated[int, Field(ge=1, le=LARGEST_SIZE)] | Annotated[str, Field(pattern="^[A-Z]$")]


class Strict(BaseModel):
    """Base of everything in a plan: unknown keys are errors, values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DType(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT32 = "int32"
    INT64 = "int64"
    UINT64 = "uint64"

    @property
    def numpy(self) -> DTypeLike:
        """The NumPy dtype; bfloat16, which NumPy lacks, is carried as uint16."""
        return np.dtype("uint16" if self is DType.BFLOAT16 else self.value)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.numpy).itemsize


class Tensor(Strict):
    """A named tensor. A one-letter dimension is a symbol of `plans.names`, a number is fixed."""

    name: str
    dtype: DType
    shape: tuple[Dimension, ...]

    def resolve(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every symbol replaced by its value in `sizes`."""
        return tuple(sizes[d] if isinstance(d, str) else d for d in self.shape)

    def elements(self, sizes: Mapping[str, int]) -> int:
        return prod(self.resolve(sizes))
