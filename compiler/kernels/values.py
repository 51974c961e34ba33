"""Values of a graph while it becomes launches: in memory, or known by a rule for each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.compiler.kernels.code import Node
from outrider.compiler.kernels.sizes import Size

Kind = Literal["real", "integer"]
"""float32, or int64 (truths are integers)."""

Shape = tuple[Size, ...]
At = Callable[[Node], Node]
"""Gives the node of an element by the node of its index, counted over all dimensions."""


@dataclass(frozen=True)
class Stored:
    """A dense tensor in memory, by its name in the engine."""

    name: str
    kind: Kind
    shape: Shape


@dataclass(frozen=True)
class RuleTensor:
    """A tensor whose elements follow from a rule. It is written nowhere before somebody needs it in memory.

    `known` are its elements as sizes, of a small one that depends on the sizes of the step alone.
    """

    kind: Kind
    shape: Shape
    at: At
    known: tuple[Size, ...] | None = None


@dataclass(frozen=True)
class Weight:
    """A constant of the graph, read when it is needed."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    read: Callable[[], NDArray[np.generic]]


@dataclass(frozen=True)
class ProductInput:
    """A tensor in memory in a form that products read (`plugins.cuda.engine_kernels.FORMS`), other than float32: of
    integers, with the tensors of their `scales` and `sums`."""

    name: str
    form: int
    shape: Shape
    scales: str | None = None
    sums: str | None = None


class LaunchProduct(Protocol):
    """Launches a product: a gated `unit` after it gives `output`, or its sum with the `residual` stream."""

    def __call__(self, output: ir.Value | None = None, *, unit: int = 0, residual: Stored | None = None) -> None: ...


@dataclass(frozen=True)
class PendingProduct:
    """A product that its first reader launches, with what comes after it in the same kernel, or alone. Its weight has
    so many `outputs`."""

    outputs: int
    launch: LaunchProduct


Value = Stored | RuleTensor | Weight | ProductInput | PendingProduct
