"""CUDA kernels on a machine without a GPU: the sources, compiled for the CPU, run as blocks of fibers."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plugins.cuda.compile import SOURCES
from outrider.plugins.cuda.device_op import DeviceOp
from outrider.plugins.cuda.launches import STATUS
from outrider.plugins.ops import OPS
from outrider.plugins.tensorrt.source import PARTS

HERE = Path(__file__).resolve().parent

KERNELS, ENGINES, OF_ENGINES = (f'#include "{name}.cu"\n' for name in ("kernels", "engine", "engine/kernels"))
"""Our ops' kernels; these and the ones that engines of the backend `cuda` are made of; the latter alone."""

ANY_THREADS = {op.launch.kernel for op in OPS.values() if op.launch} | {
    "outrider_set_numbers", "outrider_take_tokens", "outrider_keep_tokens",
}  # fmt: skip
"""Kernels that give the same with any number of threads. As fibers are slow, they are run with few."""

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


def compile_emulator(library: Path, source: str = KERNELS, headers: Path = SOURCES) -> None:
    """Compile the kernels of `source` for the CPU, into the shared library `library`.

    `headers` is the folder of what `source` includes.
    """
    code = library.with_suffix(".cc")
    code.write_text(source, encoding="utf-8")
    includes = [f"-I{path}" for path in (headers, headers / "cuda", PARTS, HERE)]
    compiler = ["g++", "-std=c++17", *includes, str(code)]
    seen = subprocess.run([*compiler, "-E"], check=True, capture_output=True, text=True).stdout
    names = re.findall(r'extern "C" void\s+(\w+)\(', seen)
    table = ", ".join(f'{{"{name}", unpacked({name}, {int(name in ANY_THREADS)})}}' for name in names)
    code.write_text(f'{source}\n#define EMULATED_KERNELS {table}\n#include "library.h"\n', encoding="utf-8")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-fPIC", "-shared"]
    flags.append("-fno-gnu-unique")  # libraries of several kernels in one process have shared memory each
    subprocess.run([*compiler, *flags, "-o", str(library)], check=True)


class Emulator:
    """A library of kernels, of sources or of PTX, and ops bound to arrays as `plugins.native.create` binds them."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._library = ctypes.CDLL(str(library))
        self._library.emulate.argtypes = [
            ctypes.c_char_p, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_void_p, ctypes.c_uint,
        ]  # fmt: skip
        if hasattr(self._library, "race"):  # kernels as PTX, of which every access is watched
            self._library.race.restype = ctypes.c_char_p
            self._library.early.restype = ctypes.c_void_p
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

    def missed(self, run: Callable[[], None]) -> list[bool]:
        """Whether each barrier, fence and wait for earlier kernels that `run` reaches is missed where it is left out:
        one after another, of PTX alone."""
        list(iter(map(self._library.reached, count()).__next__, -1))  # of launches before
        run()
        reached = list(iter(map(self._library.reached, count()).__next__, -1))
        return [any(self._misses(site, order, run) for order in ORDERS) for site, there in enumerate(reached) if there]

    def _misses(self, site: int, order: str, run: Callable[[], None]) -> bool:
        self._library.leave_out(site)
        try:
            with self.blocks_in_order(order):
                run()
        except AssertionError as error:
            return re.search("a race in|may write before it|reach the same barriers", str(error)) is not None
        finally:
            self._library.leave_out(-1)
        return False

    def early(self) -> tuple[int, int]:
        """The addresses between which the last launch read before it waited for those before it: of PTX alone."""
        if not hasattr(self._library, "early"):
            return 0, 0
        least, most = (self._library.early(end) or 0 for end in (0, 1))
        return least, most

    def launch(self, kernel: str, blocks: int, threads: int, values: Sequence[Any], shared: int = 0) -> None:
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._launches += 1
        code = self._library.emulate(kernel.encode(), blocks, threads, shared, parameters, self._launches)
        assert code != 1, f"the emulator has no kernel {kernel}"
        assert code != 2, f"threads of {kernel} do not all reach the same barriers, or lanes the same collectives"
        assert code != 3, f"a race in {self._library.race().decode()}"
        assert code != 4, f"{kernel} writes beside its {shared} bytes of dynamic shared memory"
