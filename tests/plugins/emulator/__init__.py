"""CUDA kernels on a machine without a GPU: the sources, compiled for the CPU, run as blocks of fibers."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plugins.cuda import DeviceOp
from plugins.cuda.compile import SOURCES
from plugins.cuda.launches import STATUS

HERE = Path(__file__).resolve().parent


ORDERS = ("shuffled", "first to last", "last to first")
"""Orders in which the blocks of a launch may run, as the library numbers them."""


@dataclass(frozen=True)
class Memory:
    """An array as a device's."""

    array: NDArray[Any]

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def itemsize(self) -> int:
        return self.array.itemsize

    @property
    def dtype(self) -> str:
        return self.array.dtype.name


def compile_emulator(library: Path) -> None:
    """Compile the kernels for the CPU, into the shared library `library`."""
    includes = [f"-I{path}" for path in (SOURCES, SOURCES / "cuda", HERE)]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC", "-shared"]
    subprocess.run(["g++", *flags, *includes, str(HERE / "emulator.cc"), "-o", str(library)], check=True)


class Emulator:
    """A library of kernels, of sources or of PTX, and ops bound to arrays as `plugins.native.create` binds them."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulate.argtypes = [
            ctypes.c_char_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p, ctypes.c_uint,
        ]  # fmt: skip
        if hasattr(self._library, "race"):  # kernels as PTX, of which every access is watched
            self._library.race.restype = ctypes.c_char_p
        self._launches = 0

    @contextmanager
    def blocks_in_order(self, order: str) -> Iterator[None]:
        """Launches within run their blocks in one of ORDERS; others, shuffled."""
        self._library.set_order(ORDERS.index(order))
        try:
            yield
        finally:
            self._library.set_order(0)

    def create(
        self,
        op_name: str,
        tensors: Mapping[str, NDArray[Any]],
        attributes: Mapping[str, int | float] | None = None,
        most_threads: int = 64,
    ) -> Callable[..., int]:
        """A bound op; called with extents, it returns the number of the fault that it found, or 0."""
        spaces: dict[str, NDArray[np.uint8]] = {}

        def workspace(name: str, size: int, zeroed: bool) -> int:
            spaces[name] = np.full(size, 0 if zeroed else 0xA5, np.uint8)  # else anything
            return int(spaces[name].ctypes.data)

        memory = {name: Memory(array) for name, array in tensors.items()}
        op = DeviceOp(op_name, memory, attributes or {}, workspace)

        def call(*extents: int) -> int:
            assert memory
            blocks, threads, values = op.values(*extents)
            self.launch(op.launch.kernel, blocks, min(threads, most_threads), values)
            return int(spaces[STATUS].view(np.int64)[0]) if STATUS in spaces else 0

        return call

    def launch(self, kernel: str, blocks: int, threads: int, values: list[Any]) -> None:
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launches += 1
        code = self._library.emulate(kernel.encode(), blocks, threads, parameters, self._launches)
        assert code != 1, f"the emulator has no kernel {kernel}"
        assert code != 2, f"not every thread of a block of {kernel} comes to the same barriers"
        assert code != 3, f"a race in {self._library.race().decode()}"
