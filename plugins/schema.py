"""Parts of an op's schema, and the constants that ops share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from plans import names

Dim = int | str
INTEGER = "int64"
CAPACITY = "capacity"  # slots of a KV cache
ANY_FLOAT = "float32 | float16 | bfloat16"  # model precision: what an op only moves, or computes in


class Purpose(IntEnum):
    """Keeps the kinds of draws apart: the last word of the Philox counter (DESIGN section 7)."""

    TARGET = 0
    DRAFT = 1
    REJECTION = 2


class FilterOrder(IntEnum):
    """When the temperature is applied: before top-k and top-p (seed 003), or to what they leave (seed 001)."""

    TEMPERATURE_FIRST = 0
    TEMPERATURE_LAST = 1


class Reduction(IntEnum):
    """How the scores of a block of keys by several queries become one (`BlockSelect`)."""

    MAX = 0
    MEAN = 1
    LAST = 2


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an op: its name in the op, its dtype as NumPy spells it, its shape in sizes and symbols."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class AttributeSpec:
    """A constant of an op. Without a default it must be given."""

    name: str
    kind: type[int] | type[float]
    default: int | float | None = None


@dataclass(frozen=True)
class OpSchema:
    """An op of domain `outrider`.

    `extents` names the run-time sizes that its CPU kernel is called with, in order. A tensor that stands in inputs and
    in outputs is changed in place. A dense part with the extents lies at the start of a tensor's memory.
    """

    name: str
    version: int
    doc: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...] = ()
    extents: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor once: the inputs, then the outputs that are not inputs."""
        taken = {spec.name for spec in self.inputs}
        return self.inputs + tuple(spec for spec in self.outputs if spec.name not in taken)


def per_new_token(name: str) -> TensorSpec:
    """An integer for each new token of a step."""
    return TensorSpec(name, INTEGER, (names.NEW,))


def per_row(name: str) -> TensorSpec:
    """An integer for each row."""
    return TensorSpec(name, INTEGER, (names.ROWS,))


def one(name: str) -> TensorSpec:
    """One integer."""
    return TensorSpec(name, INTEGER, (1,))


ROW_SPLITS = TensorSpec(names.ROW_SPLITS, INTEGER, (names.ROW_EDGES,))
"""Which row owns which new tokens."""
