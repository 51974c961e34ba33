"""The CPU kernels: ops that are bound to their arrays once, and then called with the sizes of each step.

A bound op keeps its arrays alive and reads and writes their memory at every call. A call works on their leading part:
with extents N, T, R and S, `attn_bias` is a dense `[R, 1, S, T]` at the start of its buffer, and the op reads the first
R rows of `bim` and R + 1 row splits. `bim` and `kv` keep the strides of their full capacity. Calls allocate nothing
after the first ones. Only one thread at a time may use a bound op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.plans import names
from outrider.plugins.ops import OPS
from outrider.plugins.schema import Dim, OpSchema

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
    NgramMemory,
    Ngrams,
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
    "BoundOp",
    "NgramMemory",
    "Ngrams",
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

    Arrays are C-contiguous with the dtypes and shapes of `plugins.ops.OPS[op_name].schema`; arrays that share a symbol
    agree on its size, and those of the same choice of dtypes on their dtype. Raises TypeError for a wrong dtype,
    ValueError for anything else; the message names the op, the tensor, the expectation and the finding.
    """
    if op_name not in OPS:
        raise ValueError(f"There is no op {op_name!r}; the ops are {', '.join(OPS)}.")
    schema, kernel = OPS[op_name].schema, getattr(_native, op_name, None)
    if kernel is None:
        raise ValueError(f"{op_name} stands in graphs only: it has no CPU kernel to bind.")
    given = dict(attributes or {})
    _check_names(schema, "tensor", {spec.name for spec in schema.tensors}, set(tensors))
    required = {spec.name for spec in schema.attributes if spec.default is None}
    optional = {spec.name for spec in schema.attributes} - required
    _check_names(schema, "attribute", required, set(given) - optional)
    sizes = _check_tensors(schema, tensors)
    for attribute in schema.attributes:
        value = given.get(attribute.name, attribute.default)
        if type(value) is not int:
            raise TypeError(f"{schema.name}: attribute {attribute.name} must be an int; found {value!r}.")
        sizes[attribute.name] = value
    # Return the bound method, not its object: calling an object builds a tuple of arguments, a third of the shortest
    # calls' time.
    bound: BoundOp = kernel(dict(tensors), sizes, list(schema.extents)).__call__
    return bound


def folder() -> Path:
    """Return the folder of the built libraries."""
    return Path(str(_native.__file__)).parent


def _check_names(schema: OpSchema, kind: str, expected: set[str], found: set[str]) -> None:
    if missing := sorted(expected - found):
        raise ValueError(f"{schema.name}: missing {kind} {', '.join(missing)}.")
    if unknown := sorted(found - expected):
        raise ValueError(f"{schema.name}: unknown {kind} {', '.join(unknown)}.")


def _check_tensors(schema: OpSchema, tensors: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Return the sizes of the schema's symbols. Raises as `create` does where an array is not as the schema says."""
    sizes: dict[str, int] = {}
    dtypes: dict[str, str] = {}  # found, by the choice of dtypes that the schema leaves
    written = {spec.name for spec in schema.outputs}
    for spec in schema.tensors:
        array, dtype = tensors[spec.name], dtypes.get(spec.dtype, spec.dtype)
        if fault := _fault(array, dtype.split(" | "), spec.shape, sizes, spec.name in written):
            error, found = fault
            shape = ", ".join(f"{dim}={sizes[dim]}" if dim in sizes else str(dim) for dim in spec.shape)
            raise error(
                f"{schema.name}: tensor {spec.name!r} must be a C-contiguous NumPy array "
                f"{dtype.replace(' | ', ' or ')} [{shape}]; found {found}."
            )
        dtypes[spec.dtype] = array.dtype.name
        sizes |= {dim: size for dim, size in zip(spec.shape, array.shape, strict=True) if isinstance(dim, str)}
        if names.ROWS in sizes:
            sizes[names.ROW_EDGES] = sizes[names.ROWS] + 1
    return sizes


def _fault(
    array: object, dtypes: Sequence[str], shape: Sequence[Dim], sizes: Mapping[str, int], written: bool
) -> tuple[type[Exception], str] | None:
    """Return how an array is not as expected, if it is not: the error to raise, and what was found."""
    if not isinstance(array, np.ndarray):
        return TypeError, f"a {type(array).__name__}"
    dtype = array.dtype.name
    found = f"{dtype} {list(array.shape)}"
    if dtype not in dtypes:
        return TypeError, found
    if not array.dtype.isnative:
        return TypeError, f"{found} in the other byte order"
    wanted = [
        sizes.get(dim, size) if isinstance(dim, str) else dim for dim, size in zip(shape, array.shape, strict=False)
    ]
    if len(shape) != array.ndim or wanted != list(array.shape):
        return ValueError, found
    if not (array.flags.c_contiguous and array.flags.aligned):
        return ValueError, f"{found} with gaps between its elements or out of alignment"
    if written and not array.flags.writeable:
        return ValueError, f"{found} that is read-only, and the op writes it"
    return None
