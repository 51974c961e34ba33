"""The kernels as NVRTC compiles them, on a machine without a GPU: their PTX, translated to C++ and run as fibers.

The emulator of sources (`tests/plugins/emulator`) shows that what we wrote is right; this one, that what NVRTC made of
it is, and that no thread relies on an order which nothing keeps. **Start reading** at `translate.py`.

    parse.py         PTX as data
    translate.py     functions and instructions as C++
    arithmetic.h     what instructions calculate; matrix products: emulator/matrix.h
    machine.h        what translated code runs on, over emulator/grid.h
    races.h          the watch on memory
    library.h        the kernels as a library, with the entries of the emulator of sources

An instruction that the translator does not know is an error that names it: then teach it the instruction.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from outrider.plugins.cuda.compile import SOURCES
from outrider.plugins.tensorrt.compile import compile_ptx
from tests.plugins.emulator import HERE as EMULATOR
from tests.plugins.ptx.parse import parse
from tests.plugins.ptx.translate import translate

HERE = Path(__file__).resolve().parent


def compile_translated(library: Path, source: str) -> None:
    """Compile the kernels of `source` with NVRTC, and their PTX for the CPU, into the shared library `library`.

    It is optimised no more than compiles fast. Raises UnknownPtxError.
    """
    code = library.with_suffix(".cc")
    code.write_text(translate(parse(compile_ptx(source, "translated", "compute_90"))), encoding="utf-8")
    flags = ["-std=c++17", "-Og", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared"]
    flags += ["-fvisibility-inlines-hidden", "-fno-gnu-unique"]  # a machine for each of a process's libraries
    includes = [f"-I{path}" for path in (HERE, EMULATOR, SOURCES)]
    subprocess.run(["g++", *flags, *includes, str(code), "-o", str(library)], check=True)
