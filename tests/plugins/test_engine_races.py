"""The watch on memory of translated PTX finds a barrier that is left out of a kernel of an engine.

That it finds nothing where none is missing, `test_engine_kernels.py` shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from outrider.plugins.cuda.compile import SOURCES
from outrider.plugins.cuda.engine_kernels import FORMS, half_bytes, quant_bytes
from tests.plugins.emulator import Emulator
from tests.plugins.engine_driver import launch, real
from tests.plugins.test_engine_kernels import attend, poisoned, quantized

RNG = np.random.default_rng(0)


def norm(kernels: Emulator) -> None:
    x, weight, to = RNG.normal(size=(2, 3, 96)).astype(np.float32), np.ones(96, np.float32), poisoned(3, 96)
    tensors = {"x": x[0], "weight": weight, "added": x[1], "normed": to, "sum": poisoned(3, 96)}
    launch(kernels, "outrider_rms_norm", tensors, {"size": 96, "epsilon": real(1e-6), "form": 0}, 3, shared=4 * 96)


def multiply_integers(kernels: Emulator, rows: int) -> None:
    _, _, _, packed = quantized(RNG, 32, 640, 4, False, False)
    x = {"integers": RNG.integers(-127, 128, (rows, 640)).astype(np.int8), "scales": np.ones((rows, 20), np.float32)}
    launch(
        kernels, "outrider_quant_product",
        {**x, "sums": np.ones((rows, 20), np.int32), "packed": packed, "to": poisoned(rows, 32)},
        {"rows": rows, "inputs": 640, "outputs": 32, "bits": 4, "wide": 0, "minimums": 0, "unit": 0, "form": 0}, 1,
        shared=quant_bytes(4, rows),
    )  # fmt: skip


def multiply_halves(kernels: Emulator) -> None:
    x, weight = (RNG.integers(0, 2**14, (rows, 512)).astype(np.uint16) for rows in (3, 64))
    numbers = {"rows": 3, "inputs": 512, "outputs": 32, "element": FORMS.index("float16"), "unit": 1, "form": 0}
    launch(
        kernels, "outrider_half_product", {"x": x, "weight": weight, "to": poisoned(3, 32)}, numbers, 1,
        shared=half_bytes(3),
    )  # fmt: skip


def attention(kernels: Emulator) -> None:
    caches = RNG.normal(size=(2, 1, 1, 600, 64)).astype(np.float32)
    bias = np.zeros((1, 2, 600), np.float32)
    queries = RNG.normal(size=(2, 2, 64)).astype(np.float32)
    attend(kernels, queries, caches, bias, np.array([0, 2]), scale=0.25, keys_at_once=100)


def append(kernels: Emulator) -> None:
    packed, caches = RNG.normal(size=(2, 4 * 64)).astype(np.float32), np.zeros((2, 1, 1, 8, 64), np.float32)
    own = {"row_splits": np.array([0, 2]), "past_length": np.array([3]), "queries": poisoned(2, 2, 64)}
    norms = np.ones((2, 64), np.float32)
    launch(
        kernels, "outrider_append",
        {
            **dict.fromkeys(("query", "key", "value"), packed), **own, "query_norm": norms[0], "key_norm": norms[1],
            "keys": caches[0], "values": caches[1],
        },
        {
            "rows": 1, "heads": 2, "kv_heads": 1, "size": 64, "rotated": 0, "capacity": 8, "query_stride": 256,
            "kv_stride": 256, "query_place": 0, "key_place": 128, "value_place": 192, "element": 0,
            "epsilon": real(1e-6), "limit": 0,
        },
        6, 64,
    )  # fmt: skip


def entropy(kernels: Emulator) -> None:
    logits = RNG.normal(size=(2, 500)).astype(np.float32)
    launch(kernels, "outrider_entropy", {"logits": logits, "to": poisoned(2)}, {"vocabulary": 500}, 2)


RUNS: dict[str, tuple[Callable[[Emulator], None], ...]] = {
    "attention": (append, attention),
    "entropy": (entropy,),
    "half_product": (multiply_halves,),
    "quant_product": (partial(multiply_integers, rows=3), partial(multiply_integers, rows=17)),
    "rms_norm": (norm,),
}
"""What comes to the barriers of a header's kernels."""

SPARE = {"attention": 1, "entropy": 1}
"""Barriers of inlined sums, before anyone writes again, after which nobody does."""


@pytest.mark.long  # half a minute of compilers; those of ops are watched in every run
@pytest.mark.parametrize("header", RUNS)
def test_a_barrier_that_is_missing_is_found(translated_engines: Emulator, header: str) -> None:
    """Every barrier of every kernel, those of warps, fences and waits for earlier kernels too, one after another."""

    def run() -> None:
        for each in RUNS[header]:
            each(translated_engines)

    missed = translated_engines.missed(run)
    text = (SOURCES / "cuda" / "engine" / f"{header}.cu.h").read_text(encoding="utf-8")
    assert len(missed) >= len(re.findall(r"\b(?:warp_)?barrier\(\);|\bwait_for_earlier\(\);", text))
    assert missed.count(False) == SPARE.get(header, 0)
