"""Kernels of processors that this machine is not have the references' bits as well: AMX emulated, arm64 under QEMU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.plugins.panel_layout import pack_panels
from outrider.plugins.reference import quant_matmul, to_slots
from tests.plugins.kernel_driver import Case, Driver, arm64_drivers, has_avx512, native_driver, product
from tests.plugins.test_quant_matmul import drawn, packed_weights, rows


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
