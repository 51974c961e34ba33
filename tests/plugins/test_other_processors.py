"""Every op on the CPU has the same bits with every instruction set, and kernels of processors that this machine is not
have the references' bits as well: AMX emulated, arm64 under QEMU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.plugins.panel_layout import pack_panels
from outrider.plugins.reference import quant_matmul, to_slots
from tests.instruction_sets import BETTER_THAN_PLAIN, Results, with_instructions
from tests.plugins.kernel_driver import Case, Driver, arm64_drivers, has_avx512, native_driver, product
from tests.plugins.test_cpu_attention import TYPES, attend, capped_step, step, typed
from tests.plugins.test_cpu_rows import ACTIVATIONS, gated_unit, norm, softcap, sweep
from tests.plugins.test_mixture_of_experts import of_experts
from tests.plugins.test_quant_matmul import drawn, packed_weights, rows, session


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return native_driver(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Driver]:
    return arm64_drivers(tmp_path_factory.mktemp("arm64"))


def products(counts: Callable[[np.random.Generator], int], cases: int) -> tuple[list[Case], bytes]:
    """Return random shapes in every layout, and what the reference makes of them."""
    rng = np.random.default_rng(11)
    made, expected = [], b""
    for case in range(cases):
        bits, minimums, wide = (4, 8)[case % 2], case % 4 >= 2, case % 8 >= 4
        outputs, blocks = int(rng.choice([1, 7, 16, 17, 32, 45, 96, 100])), int(rng.integers(1, 20))
        weights, x = drawn(rng, outputs, blocks, bits, minimums, wide), rows(rng, counts(rng), blocks)
        if case % 8 == 7:
            x[-1, 5] = np.nan
        made.append(product(x, *packed_weights(weights, bits)))
        expected += quant_matmul(x, *weights).tobytes()
    return made, expected


def assert_same(found: bytes, expected: bytes) -> None:
    """Compare words of 32 bits; NaN alone has other bits on other processors."""
    words = [np.frombuffer(results, np.uint32) for results in (found, expected)]
    np.testing.assert_array_equal(*(np.where(word & 0x7FFFFFFF > 0x7F800000, 0x7FC00000, word) for word in words))


@pytest.mark.long
@pytest.mark.skipif(not has_avx512(), reason="what is not emulated of AMX's kernel needs AVX-512")
def test_amx_has_the_references_bits(native: Driver) -> None:
    """From 16 rows on tiles multiply, and the last tile may have rows of another; fewer rows are AVX-512's."""
    cases, expected = products(lambda rng: int(rng.choice([1, 15, 16, 17, 31, 32, 33, 50])), 64)
    assert_same(native.run(cases), expected)


@pytest.mark.parametrize(
    ("processor", "isa"), [("i8mm", "i8mm"), ("i8mm", "neon"), ("neon", "neon"), ("i8mm", "plain")]
)
def test_arm64_has_the_references_bits(arm64: dict[str, Driver], processor: str, isa: str) -> None:
    cases, expected = products(lambda rng: int(rng.integers(1, 11)), 48)
    assert_same(arm64[processor].run(cases, isa), expected)


def test_arm64_takes_the_best_that_it_has(arm64: dict[str, Driver]) -> None:
    cases, expected = products(lambda rng: 3, 8)
    for best, driver in arm64.items():
        assert_same(driver.run(cases), expected)
        for isa in ("plain", "neon", "i8mm"):
            if ("plain", "neon", "i8mm").index(isa) <= ("plain", "neon", "i8mm").index(best):
                driver.run([], isa)
            else:
                with pytest.raises(RuntimeError, match="instructions that this processor lacks"):
                    driver.run([], isa)
    with pytest.raises(RuntimeError, match="instructions that this processor lacks"):
        arm64["i8mm"].run([], "avx512")


def lanes() -> list[Case]:
    """Attention over caches of every type, rows of logits and activations, and products in float32."""
    rng = np.random.default_rng(12)
    cases = []
    for size in (8, 16, 20, 64, 128):  # whole vectors of lanes, and parts of one
        for kind in ("float32", "float16", "int8"):
            tokens, heads, view = int(rng.integers(1, 7)), int(rng.integers(1, 4)), int(rng.integers(1, 200))
            bias = np.where(rng.random((tokens, view)) < 0.3, np.float32(-1e9), np.float32(0))
            arrays: list[NDArray[Any]] = [rng.normal(size=(tokens * heads, size)).astype(np.float32)]
            for _ in range(2):
                numbers = rng.normal(size=(view, size)).astype(np.float32)
                arrays.append(to_slots(numbers, kind))
            cases.append(Case(kind, (tokens, heads, view, size), (bias, *arrays)))
    for count in (1, 3, 16, 33, 100, 5000):
        x, y = (rng.normal(size=count).astype(np.float32) * np.float32(20) for _ in range(2))
        x[rng.random(count) < 0.05] = -np.inf
        x[1::17] = np.nan
        cases.append(Case("row", (count,), (x, y)))
    for count in range(1, 10):
        inputs, outputs = int(rng.integers(1, 90)), int(rng.integers(1, 50))
        x, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((count, inputs), (1, inputs, outputs)))
        packed = pack_panels(weights)
        cases.append(Case("panels", (packed.shape[1], inputs, count), (packed, x)))
    return cases


@pytest.mark.parametrize("isa", ["neon", "plain"])
def test_arm64_has_the_bits_of_plain_code_here(arm64: dict[str, Driver], native: Driver, isa: str) -> None:
    assert_same(arm64["neon"].run(lanes(), isa), native.run(lanes()))


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
        for count in (1, 5, 17):
            x = rng.normal(size=(count, 96)).astype(np.float32)
            found[f"{bits} bits, {minimums}, {count} rows"] = session("QuantMatMul", layout).run(
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
