"""The CPU kernels: ops that are bound to their arrays once, and then called with the sizes of each step.

A bound op keeps its arrays alive and reads and writes their memory at every call. A call works on their leading part:
with extents N, T, R and S, `attn_bias` is a dense `[R, 1, S, T]` at the start of its buffer, and the op reads the first
R rows of `bim` and R + 1 row splits. `bim` and `kv` keep the strides of their full capacity. Calls allocate nothing
after the first ones. Only one thread at a time may use a bound op.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from outrider.plugins.schema import OpSchema
from outrider.plugins.schemas import SCHEMAS

try:
    from outrider.plugins import _native
except ImportError as error:
    raise ImportError(
        "The CPU kernels are missing: plugins._native is not built for this Python, or Python found the package "
        "in the source tree instead of where it was installed. "
        "Run `pip install -e .` at the top of the repository, or start Python elsewhere."
    ) from error

from outrider.plugins._native import (
    SAMPLING_COLUMNS,
    BimMask,
    BlockSelect,
    BlockSummary,
    ChainAccept,
    KvGather,
    NgramMemory,
    Ngrams,
    PartialKvGather,
    RaceNoise,
    Sample,
    TreeAccept,
    accepts,
    exponential,
    likeliest,
    log_sum_exp,
    noise,
    race,
    residual,
    uniform,
    weights,
)

__all__ = [
    "SAMPLING_COLUMNS",
    "BimMask",
    "BlockSelect",
    "BlockSummary",
    "BoundOp",
    "ChainAccept",
    "KvGather",
    "NgramMemory",
    "Ngrams",
    "PartialKvGather",
    "RaceNoise",
    "Sample",
    "TreeAccept",
    "accepts",
    "create",
    "exponential",
    "folder",
    "likeliest",
    "log_sum_exp",
    "noise",
    "race",
    "residual",
    "uniform",
    "weights",
]


class BoundOp(Protocol):
    """An op on fixed arrays; a call takes the extents of its schema, in order, and writes results into its arrays.

    Raises ValueError for extents beyond the arrays, and for values in the arrays that the op cannot use.
    """

    def __call__(self, *extents: int) -> None: ...


def create(
    op_name: str, tensors: Mapping[str, NDArray[Any]], attributes: Mapping[str, int | float] | None = None
) -> BoundOp:
    """Bind op `op_name` to arrays of full capacity, by the tensor names of its schema.

    Arrays are C-contiguous with the dtypes and shapes of `plugins.schemas.SCHEMAS[op_name]`; arrays that share a symbol
    agree on its size, and E is R + 1. Raises TypeError for a wrong dtype, ValueError for anything else; the message
    names the op, the tensor, the expectation and the finding.
    """
    schema = SCHEMAS.get(op_name)
    kernel = getattr(_native, op_name, None)
    if schema is None:
        raise ValueError(f"There is no op {op_name!r}; the ops are {', '.join(SCHEMAS)}.")
    if kernel is None:
        raise ValueError(f"{op_name} stands in graphs only: it has no CPU kernel to bind.")
    given = dict(attributes or {})
    _check_names(schema, "tensor", {spec.name for spec in schema.tensors}, set(tensors))
    required = {spec.name for spec in schema.attributes if spec.default is None}
    optional = {spec.name for spec in schema.attributes} - required
    _check_names(schema, "attribute", required, set(given) - optional)
    # Return the bound method, not its object: calling an object builds a tuple of arguments, a third of the shortest
    # calls' time.
    bound: BoundOp = kernel(**tensors, **given).__call__
    return bound


def folder() -> Path:
    """Return the folder of the built libraries."""
    return Path(str(_native.__file__)).parent


def _check_names(schema: OpSchema, kind: str, expected: set[str], found: set[str]) -> None:
    if missing := sorted(expected - found):
        raise ValueError(f"{schema.name}: missing {kind} {', '.join(missing)}.")
    if unknown := sorted(found - expected):
        raise ValueError(f"{schema.name}: unknown {kind} {', '.join(unknown)}.")
