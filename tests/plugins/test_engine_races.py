"""The watch on memory of translated PTX finds a barrier that is taken out of a kernel of an engine.

That it finds nothing where none is missing, `test_engine_kernels.py` shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from plugins.cuda.compile import SOURCES
from plugins.cuda.engine_kernels import FORMS
from tests.plugins.emulator import Emulator
from tests.plugins.engine_driver import launch, real
from tests.plugins.test_engine_kernels import attend, poisoned, quantized

pytest.importorskip("cuda.bindings")
if shutil.which("g++") is None:
    pytest.skip("translated PTX is compiled with g++", allow_module_level=True)

from tests.plugins.ptx import compile_translated

RNG = np.random.default_rng(0)


def norm(kernels: Emulator) -> None:
    x, weight, to = RNG.normal(size=(2, 3, 96)).astype(np.float32), np.ones(96, np.float32), poisoned(3, 96)
    tensors = {"x": x[0], "weight": weight, "added": x[1], "normed": to, "sum": poisoned(3, 96)}
    launch(kernels, "outrider_rms_norm", tensors, {"size": 96, "epsilon": real(1e-6), "form": 0}, 3)


def multiply_integers(kernels: Emulator) -> None:
    _, _, _, packed = quantized(RNG, 32, 640, 4, False, False)
    rows = {"integers": RNG.integers(-127, 128, (3, 640)).astype(np.int8), "scales": np.ones((3, 20), np.float32)}
    launch(
        kernels, "outrider_quant_product",
        {**rows, "sums": np.ones((3, 20), np.int32), "packed": packed, "to": poisoned(3, 32)},
        {"rows": 3, "inputs": 640, "outputs": 32, "bits": 4, "wide": 0, "minimums": 0, "unit": 0, "form": 0}, 1,
    )  # fmt: skip


def multiply_halves(kernels: Emulator) -> None:
    x, weight = (RNG.integers(0, 2**14, (rows, 512)).astype(np.uint16) for rows in (3, 64))
    numbers = {"rows": 3, "inputs": 512, "outputs": 32, "element": FORMS.index("float16"), "unit": 1, "form": 0}
    launch(kernels, "outrider_half_product", {"x": x, "weight": weight, "to": poisoned(3, 32)}, numbers, 1)


def attention(kernels: Emulator) -> None:
    caches = RNG.normal(size=(2, 1, 1, 600, 16)).astype(np.float32)
    bias = np.zeros((1, 2, 600), np.float32)
    attend(kernels, RNG.normal(size=(2, 2, 16)).astype(np.float32), caches, bias, np.array([0, 2]), scale=0.25)


@pytest.mark.parametrize(
    ("header", "line", "run"),
    [
        ("rms_norm", "    partial[t] = sum;\n  }\n  barrier();\n", norm),
        ("rms_norm", "  barrier();  // before anyone writes again, and behind what made the row\n", norm),
        ("quant_product", "    barrier();\n    for (int b = 0;", multiply_integers),
        ("quant_product", "    barrier();\n  }\n}\n", multiply_integers),
        ("half_product", "  barrier();\n  for (int i = 0; i < kHalfOwn; ++i) {\n    const i64", multiply_halves),
        ("half_product", "  barrier();  // before anyone writes again\n", multiply_halves),
        ("attention", "  barrier();\n\n  const float factor", attention),
        ("attention", "  barrier();\n  const i64 stride", attention),
    ],
)  # fmt: skip
def test_a_barrier_that_is_missing_is_found(
    tmp_path: Path, header: str, line: str, run: Callable[[Emulator], None]
) -> None:
    shutil.copytree(SOURCES, tmp_path / "csrc", ignore=shutil.ignore_patterns("cpu", "onnxruntime"))
    path = tmp_path / "csrc" / "cuda" / "engine" / f"{header}.cu.h"
    text = path.read_text(encoding="utf-8")
    assert text.count(line) == 1
    path.write_text(text.replace(line, line.replace("barrier();", "", 1)), encoding="utf-8")
    library = tmp_path / "kernels.so"
    compile_translated(library, f'#include "engine/{header}.cu.h"\n', tmp_path / "csrc")
    with pytest.raises(AssertionError, match="a race in outrider_"):
        run(Emulator(library))
