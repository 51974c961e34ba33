"""Kernels of other processors, compiled with a driver and run by an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.plugins.cuda.compile import SOURCES
from outrider.plugins.quant_layout import QuantLayout

HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c++17", "-O0", "-ffp-contract=off", "-fno-math-errno", f"-I{SOURCES}", f"-I{HERE}")
COMMON = ("isa.cc", "kernels.cc", "kernels_plain.cc", "quant_kernels.cc", "quant_plain.cc")
KINDS = ("product", "row", "float32", "float16", "int8", "panels")
"""Kinds of case, of which those named for a type are attention over a cache of such numbers."""

Sources = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Case:
    """What the driver takes: `driver.cc` says which numbers and arrays belong to a kind."""

    kind: str
    numbers: tuple[int, ...]
    arrays: tuple[NDArray[Any], ...]

    def __bytes__(self) -> bytes:
        header = np.zeros(8, np.int64)
        header[: 1 + len(self.numbers)] = KINDS.index(self.kind), *self.numbers
        return b"".join([header.tobytes(), *(array.tobytes() for array in self.arrays)])


def product(x: NDArray[np.float32], packed: NDArray[np.uint8], layout: QuantLayout) -> Case:
    numbers = layout.outputs, layout.inputs, layout.bits, int(layout.wide), int(layout.minimums), len(x)
    return Case("product", numbers, (packed, x))


@dataclass(frozen=True)
class Driver:
    """A driver of one processor's kernels; `command` runs it."""

    command: tuple[str, ...]

    def run(self, cases: Iterable[Case], isa: str = "") -> bytes:
        """Return the results of all cases, one after another; raise with the driver's words where it refuses."""
        ran = subprocess.run(
            self.command,
            input=b"".join(map(bytes, cases)), env=os.environ | {"OUTRIDER_ISA": isa}, capture_output=True, check=False,
        )  # fmt: skip
        if ran.returncode != 0:
            raise RuntimeError(ran.stderr.decode())
        return ran.stdout


def compile_driver(folder: Path, compiler: str, sources: Sources, *flags: str, link: tuple[str, ...] = ()) -> str:
    """Compile the driver with the kernels' sources that all have, and with `sources`, each with its own flags."""
    files = {SOURCES / "onnxruntime" / name: own for name, own in {**dict.fromkeys(COMMON, ()), **sources}.items()}
    files[HERE / "driver.cc"] = ()

    def compile_one(file: Path) -> str:
        made = folder / f"{file.stem}.o"
        subprocess.run([compiler, *FLAGS, *flags, *files[file], "-c", str(file), "-o", str(made)], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, files))
    subprocess.run([compiler, *flags, *link, *objects, "-o", str(folder / "driver")], check=True)
    return str(folder / "driver")


def has_avx512() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "avx512bw" in processor.read_text(encoding="utf-8")


def native_driver(folder: Path) -> Driver:
    """Plain code and, on a machine with AVX-512, products by AMX, its tiles emulated and its use of memory watched."""
    if not has_avx512():
        return Driver((compile_driver(folder, "g++", {}),))
    own = "-mavx512f", "-mavx512bw", "-mfma", "-mf16c", "-fsanitize=address"
    flags = "-DOUTRIDER_EMULATED_AMX", "-DOUTRIDER_KERNELS=quant_amx"
    return Driver((compile_driver(folder, "g++", {"quant_amx.cc": own}, *flags, link=("-fsanitize=address",)),))


def arm64_drivers(folder: Path) -> dict[str, Driver]:
    """Processors of arm64 under QEMU, by the best instructions of each."""
    compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
    if shutil.which(compiler) is None or shutil.which(emulator) is None:
        pytest.skip("needs Debian's packages g++-aarch64-linux-gnu and qemu-user")
    dot = "-march=armv8.2-a+dotprod"
    sources = {"kernels_neon.cc": (), "quant_neon.cc": (dot,), "quant_i8mm.cc": (f"{dot}+i8mm",)}
    driver = compile_driver(folder, compiler, sources, "-DOUTRIDER_ARM64", "-static")
    processors = {"i8mm": "max", "neon": "neoverse-n1", "plain": "cortex-a53"}
    return {best: Driver((emulator, "-cpu", processor, driver)) for best, processor in processors.items()}
