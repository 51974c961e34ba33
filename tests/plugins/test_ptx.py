"""The translator of PTX says what it does not know, and its watch on memory finds what nothing orders.

That it finds nothing in the kernels, and that they give what they should, the tests of kernels show.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.plugins.drafting import DOUBT, apart, expand_inputs, expand_outputs, noise_of
from tests.plugins.emulator import Emulator

pytest.importorskip("cuda.bindings")
if shutil.which("g++") is None:
    pytest.skip("translated PTX is compiled with g++", allow_module_level=True)

from tests.plugins.ptx.parse import UnknownPtxError, parse
from tests.plugins.ptx.translate import translate

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


def test_a_kernel_is_translated_instruction_by_instruction() -> None:
    code = translate(parse(MODULE.replace("LINE", "@!%r0 add.s32 \t%r1, %r2, -7;")))
    assert "if (!r_r0) { r_r1 = static_cast<uint32_t>(r_r2 + " in code
    assert '{"thing", {f_thing, 1}}' in code


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


def test_nothing_is_found_where_nothing_is_missing(translated: Emulator) -> None:
    grow(translated)
