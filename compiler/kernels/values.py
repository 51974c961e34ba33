"""Values of a graph while it becomes launches: in memory, or known by a rule for each element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class ResidualSum:
    """A product that has been added to the residual stream, for the norm after it: `total` has the sum."""

    total: Stored


@dataclass(frozen=True)
class PendingProduct:
    """A product that waits for the gated unit after it: one kernel computes both."""

    node: ir.Node


Value = Stored | RuleTensor | Weight | ProductInput | ResidualSum | PendingProduct
