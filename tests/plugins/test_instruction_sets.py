"""Every op on the CPU has the same bits with every instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.instruction_sets import BETTER_THAN_PLAIN, Results, with_instructions
from tests.plugins.test_cpu_attention import TYPES, attend, capped_step, step, typed
from tests.plugins.test_cpu_rows import ACTIVATIONS, gated_unit, norm, softcap, sweep
from tests.plugins.test_mixture_of_experts import of_experts
from tests.plugins.test_quant_matmul import drawn, packed_weights, session


def of_ops(_: Path) -> Results:
    rng = np.random.default_rng(7)
    found = of_experts()
    for size in (8, 20, 72):  # whole vectors of lanes, and parts of one
        for kind in sorted(TYPES):
            inputs = typed(step(rng, 4, 2, size, [1, 7, 3], [0, 90, 300], 2), kind)
            outputs = attend(inputs, 4, 2)
            found |= {f"attention {size} {kind} {i}": output.view(np.uint8) for i, output in enumerate(outputs)}
            loud = capped_step(rng, (4, 2), True, 4.0, inputs)
            for window, cap in ((40, 0.0), (0, 30.0), (7, 0.9)):
                name = f"attention {size} {kind}, {window} keys under {cap}"
                found[name] = attend(loud, 4, 2, window=window, softcap=cap)[0].view(np.uint8)
    for size in (3, 100):
        x, added = (rng.normal(size=(1, 20, size)).astype(np.float32) for _ in range(2))
        found[f"norm {size}"] = norm(x, added[0, 0], added)[0]
        for activation in ACTIVATIONS:
            found[f"{activation} {size}"] = gated_unit(activation, np.concatenate([x, added], -1) * 20)
    for bits, minimums in ((4, False), (4, True), (8, False), (8, True)):
        weights = drawn(rng, 48, 3, bits, minimums, False)
        packed, layout = packed_weights(weights, bits)
        for rows in (1, 5, 17):
            x = rng.normal(size=(rows, 96)).astype(np.float32)
            found[f"{bits} bits, {minimums}, {rows} rows"] = session("QuantMatMul", layout).run(
                None, {"x": x, "packed": packed}
            )[0]
    found["tanh"] = softcap(sweep()[None], 1.0)
    found["cap"] = softcap(rng.normal(size=(3, 1001)).astype(np.float32) * 40, 30.0)
    return found


@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=pytest.mark.long) if isa in ("avxvnni", "avx512") else isa for isa in BETTER_THAN_PLAIN],
)
def test_it_has_the_bits_of_plain_code(isa) -> None:
    found = with_instructions(isa, __name__, "of_ops", Path())
    plain = with_instructions("plain", __name__, "of_ops", Path())
    assert found.keys() == plain.keys()
    for name, values in plain.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), values.view(np.uint8), name)


FOR_CPUS = "not emulated and not ptx and not tensorrt"  # kernels


@pytest.mark.skipif("OUTRIDER_ISA" in os.environ, reason="runs the others with other instructions")
@pytest.mark.long
@pytest.mark.parametrize("isa", ["plain", *BETTER_THAN_PLAIN])
def test_all_properties_hold_with_every_instruction_set(isa) -> None:
    with_instructions(isa, __name__, "of_ops", Path())  # where the processor has it
    names = "cpu_attention", "cpu_rows", "quant_matmul", "drafting"
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-k", FOR_CPUS, *files],
        env=os.environ | {"OUTRIDER_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_an_unknown_instruction_set_is_refused() -> None:
    known = "OUTRIDER_ISA must be plain, avx2, avxvnni, avx512 or amx, or on arm64 plain, neon or i8mm"
    with pytest.raises(AssertionError, match=known):
        with_instructions("sse", __name__, "of_ops", Path())
