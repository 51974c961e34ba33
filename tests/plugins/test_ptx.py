"""The translator of PTX reports unknown instructions, and its watch on memory finds accesses that nothing orders,
such as those on both sides of a barrier that is left out.

That it finds nothing where none is missing, and that kernels give what they should, the tests of kernels show.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from outrider.plugins.cuda.compile import SOURCES
from tests.plugins.drafting import DOUBT, apart, expand_inputs, expand_outputs, noise_of
from tests.plugins.emulator import Emulator
from tests.plugins.engine_driver import launch, real
from tests.plugins.ptx.parse import UnknownPtxError, parse
from tests.plugins.ptx.translate import translate
from tests.plugins.test_engine_kernels import Quantised, Written, attend, multiply_halves, poisoned

pytest.importorskip("cuda.bindings")

if shutil.which("g++") is None:
    pytest.skip("translated PTX is compiled with g++", allow_module_level=True)

MODULE = """
.visible .entry thing(
	.param .u64 thing_param_0
)
{
	.reg .b32 	%r<3>;
	LINE
	ret;
}
"""


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("tanh.approx.f32 \t%r1, %r2;", r"tanh\.approx\.f32 .* in thing"),
        ("cvta.shared.u64 \t%r1, %r2;", r"cvta\.shared\.u64"),
        ("cvt.rp.f32.s32 \t%r1, %r2;", r"cvt\.rp\.f32\.s32"),
        ("shfl.sync.up.b32 \t%r1|%p1, %r2, 1, 0, -1;", r"shfl\.sync\.up\.b32"),
        ("dp4a.s32.s32 \t%r1, %r2, %r0, %r1;", r"dp4a\.s32\.s32"),
        ("bar.sync \t1;", r"bar\.sync \(bar\.sync 1;"),
        ("mov.u32 \t%r1, %clock;", "the operand '%clock' in thing"),
        (".surf .u32 \tthere;", r"the directive '\.surf .*' of thing"),
    ],
)
def test_what_the_translator_does_not_know_is_named(line, unknown) -> None:
    with pytest.raises(UnknownPtxError, match=unknown):
        translate(parse(MODULE.replace("LINE", line)))


def grow(kernels: Emulator) -> None:
    random = np.random.default_rng(1)
    branches = [(0.0, 0, 1.0, 0.0), (0.8, 5, 0.9, 0.0)]
    score = -random.exponential(size=(2, 3)).astype(np.float32)
    inputs = expand_inputs(apart(random, (2, 3, 300)), score, branches, noise_of(random, 2, 300))
    call = kernels.create("TreeExpand", inputs | expand_outputs(inputs, 4), {"top_k": 4, **DOUBT})
    for _ in range(3):
        assert call() == 0


def test_a_barrier_or_a_fence_that_is_missing_is_found(translated: Emulator) -> None:
    """But those before anyone writes again, where nobody does: folds and choices are inlined."""
    missed = translated.missed(lambda: grow(translated))
    assert (missed.count(True), missed.count(False)) == (27, 6)


RNG = np.random.default_rng(0)


def norm(kernels: Emulator) -> None:
    x, weight, to = RNG.normal(size=(2, 3, 96)).astype(np.float32), np.ones(96, np.float32), poisoned(3, 96)
    tensors = {"x": x[0], "weight": weight, "added": x[1], "normed": to, "sum": poisoned(3, 96)}
    launch(kernels, "outrider_rms_norm", tensors, {"size": 96, "epsilon": real(1e-6), "form": 0}, 3, shared=4 * 96)


def integers(kernels: Emulator, rows: int) -> None:
    weights, x = Quantised(RNG, 32, 640, 4), RNG.normal(size=(rows, 640)).astype(np.float32)
    weights.multiply(kernels, x, Written("float32", rows, 32), blocks=1)


def halves(kernels: Emulator) -> None:
    x, weight = (RNG.integers(0, 2**14, (rows, 512)).astype(np.uint16) for rows in (3, 64))
    multiply_halves(kernels, x, weight, "float16", Written("float32", 3, 32), unit=1, blocks=1)


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


RUNS: dict[str, tuple[Callable[[Emulator], None], ...]] = {
    "attention": (append, attention),
    "half_product": (halves,),
    "quant_product": (partial(integers, rows=3), partial(integers, rows=17)),
    "rms_norm": (norm,),
}

"""Launches that reach all barriers of a header's kernels."""

SPARE = {"attention": 1}

"""Barriers of inlined sums, before a write that never follows."""


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
