"""Kernels of engines, called by the names of their parameters, on arrays: emulated, or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans.formulas import formula
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS
from tests.plugins.emulator import Emulator
from tests.plugins.gpu import Gpu

WEIGHTS = ("weight", "packed")
"""Tensors that a kernel may read while the one before it still runs: no kernel writes them."""

Arrays = Mapping[str, "NDArray[Any] | None"]


def real(number: float) -> int:
    """A real number as a kernel takes it."""
    return int(np.float32(number).view(np.int32))


def launch(
    kernels: Emulator | Gpu,
    name: str,
    tensors: Arrays,
    numbers: Mapping[str, int],
    blocks: int,
    threads: int = 256,
    shared: int | str = 0,
) -> None:
    """Run a kernel; arrays are changed in place. What is left out is a null pointer. `shared` may be a formula."""
    spec = ENGINE_KERNELS[name]
    assert set(tensors) <= set(spec.tensors)
    assert set(numbers) == set(spec.numbers)
    given = [tensors.get(each) for each in spec.tensors]
    assert {each for each, array in zip(spec.tensors, given, strict=True) if array is None} <= spec.optional
    own = [int(numbers[each]) for each in spec.numbers]
    shared = formula(str(shared)).value({})
    if isinstance(kernels, Gpu):
        kernels.launch(name, blocks, threads, given, own, shared)
        return
    for array in given:
        assert array is None or array.flags.c_contiguous
    values: list[Any] = [ctypes.c_uint64(0 if array is None else array.ctypes.data) for array in given]
    values += [ctypes.c_int64(number) for number in own]
    kernels.launch(name, blocks, threads, values, shared)
    least, most = kernels.early()
    weights = [
        (array.ctypes.data, array.nbytes) for each, array in tensors.items() if each in WEIGHTS and array is not None
    ]
    assert least == most or any(first <= least and most <= first + size for first, size in weights), (
        f"{name} reads what other kernels may write before it has waited for them"
    )
