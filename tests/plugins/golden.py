"""Golden launches of every kernel of engines: `python -m tests.plugins.golden OUT`.

The tests of `test_engine_kernels.py` are run on the emulator, with some of their parameters, and their launches are
recorded: arguments, and what the emulator left in memory.
"""

from __future__ import annotations

import ctypes
import inspect
import lzma
import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS, FORMS
from outrider.tools.lab.gpu.stages import Array, Golden, Tensors, widened
from tests.plugins import test_engine_kernels
from tests.plugins.emulator import ENGINES, Emulator, compile_emulator
from tests.plugins.gpu import Gpu

SETS_OF_TEST, MOST_BYTES = 6, 600_000  # sets of parameters; bytes of a launch's tensors
MORE = {  # sets of parameters beside those that are drawn
    "test_quantised_products_have_the_bits_of_the_reference": [
        {"rows": rows, "bits": 4, "minimums": False, "wide": False} for rows in (8, 32)
    ]
}
COMPANY = "half_products_are_of_the_row_alone"  # the test whose launches must have the same rows
_ROUNDING = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # a result on the other side of a boundary


class Recorder(Gpu):
    """Takes launches as a GPU does, runs them on the emulator, and keeps small ones, two of a kernel and a test."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator, self.cases, self.test = emulator, list[Golden](), ""

    def launch(self, kernel: str, blocks: int, threads: int, tensors: Tensors, numbers: list[int], shared: int) -> None:
        before = _copies(tensors)
        values: list[Any] = [ctypes.c_uint64(0 if each is None else each.ctypes.data) for each in tensors]
        self.emulator.launch(kernel, blocks, threads, [*values, *map(ctypes.c_int64, numbers)], shared)
        case = Golden(self.test, kernel, blocks, threads, shared, numbers, before, _copies(tensors))
        if "half_product" in kernel:
            named = dict(zip(ENGINE_KERNELS[kernel].numbers, numbers, strict=True))
            case.form = FORMS[named["form"]]
            wide = widened(case.result(case.after), case.form)
            case.tolerance = 2e-5 * float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
            case.rounding = _ROUNDING[case.form]
            case.company = self.test if COMPANY in self.test else ""
        small = sum(each.nbytes for each in before if each is not None) < MOST_BYTES
        others = [each for each in self.cases if (each.kernel, each.name) == (kernel, self.test)]
        if case.company or (small and len(others) < 2):
            self.cases.append(case)


def _copies(tensors: Tensors) -> list[Array | None]:
    """Return copies; bfloat16, which is no type of NumPy's own, as uint16."""
    bits = (each if each is None or each.dtype.kind != "V" else each.view(np.uint16) for each in tensors)
    return [None if each is None else each.copy() for each in bits]


def draw_parameters(test: Any, rng: random.Random) -> dict[str, Any]:
    drawn: dict[str, Any] = {}
    for mark in getattr(test, "pytestmark", ()):
        named, value = mark.args[0], rng.choice(mark.args[1])
        drawn |= {named: value} if isinstance(named, str) else dict(zip(named, value, strict=True))
    return drawn


def record_tests(recorder: Recorder) -> None:
    """Record tests with some of their sets of parameters, the same ones every time."""
    rng = random.Random(0)
    for name, test in sorted(vars(test_engine_kernels).items()):
        if name.startswith("test_") and "engine_kernels" in inspect.signature(test).parameters:
            for given in [*(draw_parameters(test, rng) for _ in range(SETS_OF_TEST)), *MORE.get(name, ())]:
                recorder.test = f"{name.removeprefix('test_')}{list(given.values())}"
                if not any(case.name == recorder.test for case in recorder.cases):
                    test(recorder, **given)


def write_golden(path: Path, cases: Sequence[Golden]) -> None:
    path.write_bytes(lzma.compress(pickle.dumps(list(cases))))


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        compile_emulator(library := Path(folder) / "engines.so", ENGINES)
        recorder = Recorder(Emulator(library))
        record_tests(recorder)
    write_golden(out, recorder.cases)
    print(f"{len(recorder.cases)} golden launches: {dict(Counter(case.kernel for case in recorder.cases))}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
