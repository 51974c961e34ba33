"""The types of op schemas, and the constants that ops share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from outrider.plans import names

CPU_DOMAIN = "outrider.cpu"
"""The domain of ops that only our library for ONNX Runtime's CPU engines has."""

QUANT_OPS = ("QuantMatMul", "AsymmetricQuantMatMul", "QuantGather", "AsymmetricQuantGather")
"""The ops that read quantised weights, by name: of graphs alone, so that they have no `OpSchema`."""

EXPERT_OPS = (
    "MixtureOfExperts",
    "QuantMixtureOfExperts",
    "ClampedMixtureOfExperts",
    "ClampedQuantMixtureOfExperts",
)
"""The kinds of MixtureOfExperts, by name: with a unit of another kind and biases, with quantised weights."""

Dim = int | str
INTEGER = "int64"
CAPACITY = "capacity"  # slots of a KV cache
ANY_FLOAT = "float32 | float16 | bfloat16"  # model precision: the type that an op computes in
ANY_KV = f"{ANY_FLOAT} | int8"  # what a KV cache may be of
SLOT = "slot_size"  # of a KV cache: elements of a slot for one head (`plans.kv_slots`)


class Purpose(IntEnum):
    """The last word of the Philox counter, which keeps the kinds of draws apart."""

    TARGET = 0
    DRAFT = 1
    REJECTION = 2


class FilterOrder(IntEnum):
    """When the temperature is applied: before top-k and top-p, or to the tokens they leave."""

    TEMPERATURE_FIRST = 0
    TEMPERATURE_LAST = 1


class Reduction(IntEnum):
    """How the scores of one block of keys by several queries become one score (`BlockSelect`)."""

    MAX = 0
    MEAN = 1
    LAST = 2


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of an op: its name in the op, its dtype as NumPy spells it, its shape in sizes and symbols, and whether
    it may be left out."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    optional: bool = False


@dataclass(frozen=True)
class AttributeSpec:
    """A constant of an op; it is required where it has no default."""

    name: str
    kind: type[int] | type[float]
    default: int | float | None = None


@dataclass(frozen=True)
class OpSchema:
    """An op of domain `outrider`.

    A symbol in a shape is one size throughout the op: tensors that name the same symbol agree on it, and E is R + 1.
    Tensors of the same choice of dtypes have the same one. The first line of `doc` says what the op does.

    `extents` names the run-time sizes that the CPU kernel is called with, in order. A tensor that is both input and
    output is changed in place. A call works on a dense part of the extents' sizes at the start of a tensor's memory.
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
    """Specify one integer per new token of a step."""
    return TensorSpec(name, INTEGER, (names.NEW,))


def per_row(name: str) -> TensorSpec:
    """Specify one integer per row."""
    return TensorSpec(name, INTEGER, (names.ROWS,))


def one(name: str) -> TensorSpec:
    """Specify one integer."""
    return TensorSpec(name, INTEGER, (1,))


ATTN_BIAS = TensorSpec(names.ATTN_BIAS, "float32", (names.ROWS, 1, names.PLACES, names.VIEW))
KV = TensorSpec(names.KV, ANY_KV, ("planes", names.ROWS, "heads", CAPACITY, SLOT))
ROW_SPLITS = TensorSpec(names.ROW_SPLITS, INTEGER, (names.ROW_EDGES,))
"""Row r owns new tokens row_splits[r] to row_splits[r + 1] - 1."""
STATE_PATH = (
    per_new_token(names.PARENT),
    per_new_token(names.BRANCH),
    TensorSpec(names.REPLAY, INTEGER, ("branches", "log")),
    TensorSpec(names.REPLAYS, INTEGER, ("branches",)),
    TensorSpec(names.FOLD, INTEGER, ("branches",)),
)
"""What ops of recurrent states read of a step (`plans.names.STATE_PATH`)."""
