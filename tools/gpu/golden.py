"""Golden launches: kernels with their arguments, and what the CPU's emulation of them left in memory."""

from __future__ import annotations

import lzma
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.cuda.engine_kernels import ENGINE_KERNELS

Array = NDArray[Any]
Tensors = Sequence[Array | None]
Row = dict[str, Any]


@dataclass
class Golden:
    """One launch. `before` are its tensors, None for a null pointer, `after` what they become.

    Results have the same bits where `tolerance` is 0; else numbers of type `form` are within it and the relative error
    `rounding`. Of launches of the same `company`, each has the rows of the one before as its last.
    """

    name: str
    kernel: str
    blocks: int
    threads: int
    shared: int
    numbers: list[int]
    before: list[Array | None]
    after: list[Array | None]
    tolerance: float = 0.0
    rounding: float = 0.0
    form: str = "float32"
    company: str = ""

    def result(self, tensors: Tensors) -> Array:
        """Return the tensor of a product's results."""
        found = tensors[ENGINE_KERNELS[self.kernel].tensors.index("to")]
        assert found is not None
        return found


def write_golden(path: Path, cases: Sequence[Golden]) -> None:
    path.write_bytes(lzma.compress(pickle.dumps(list(cases))))


def read_golden(path: Path) -> list[Golden]:
    """Read what `write_golden` wrote; a file from elsewhere may run any code."""
    cases: list[Golden] = pickle.loads(lzma.decompress(path.read_bytes()))
    return cases


def compare(case: Golden, found: Tensors) -> Row:
    """Compare all tensors but scratch memory: outputs, and inputs, which must stay unchanged.

    `differ` numbers have other bits, by at most `error`.
    """
    passed, differ, error = True, 0, 0.0
    for name, expected, got in zip(ENGINE_KERNELS[case.kernel].tensors, case.after, found, strict=True):
        if expected is None or got is None or name == "partial":
            continue
        wanted, numbers = (_widened(each, case.form if name == "to" else "") for each in (expected, got))
        bits = (each.reshape(-1).view(f"u{each.itemsize}") for each in (expected, got))
        other = np.not_equal(*bits) & ~(np.isnan(wanted) & np.isnan(numbers))  # a GPU's own operations know one NaN
        if other.any():
            near = np.isclose(numbers, wanted, rtol=case.rounding, atol=case.tolerance)  # never for an infinite one
            passed &= case.tolerance > 0 and bool(near[other].all())
            differ += int(other.sum())
            distances = np.abs(wanted[other] - numbers[other])
            error = max(error, float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max()))
    return {"kernel": case.kernel, "name": case.name, "passed": passed, "differ": differ, "error": error}


def _widened(numbers: Array, form: str) -> NDArray[np.float64]:
    numbers = numbers.reshape(-1)
    if form == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return (numbers.view(np.float16) if form == "float16" else numbers).astype(np.float64)
