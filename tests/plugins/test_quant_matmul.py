"""Products with quantised weights: the kernel has the reference's bits, in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import int4, uint4
from numpy.typing import NDArray

from outrider.plugins.quant_layout import QuantLayout, fits_half, pack, unpack
from outrider.plugins.reference import dequantize, quant_matmul
from tests.plugins.onnx_node import BYTES, FLOAT, INT, body_session, kernel_session

BLOCK = 32
Weights = tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32] | None]


def session(op: str, layout: QuantLayout, threads: int = 1, rank: int = 2) -> ort.InferenceSession:
    lookup = op == "QuantGather"
    inputs = (("x", INT if lookup else FLOAT, rank), ("packed", BYTES, 1))
    return kernel_session(op, inputs, (("y", FLOAT, rank + lookup),), threads, **layout.attributes)


def packed_weights(weights: Weights, bits: int) -> tuple[NDArray[np.uint8], QuantLayout]:
    integers, scales, minimums = weights
    wide = not all(fits_half(part) for part in (scales, minimums) if part is not None)
    layout = QuantLayout(*integers.shape, bits, wide, minimums is not None)
    return pack(*weights, layout), layout


def multiply(x: NDArray[np.float32], weights: Weights, bits: int, threads: int = 1) -> NDArray[np.float32]:
    packed, layout = packed_weights(weights, bits)
    return session("QuantMatMul", layout, threads, x.ndim).run(None, {"x": x, "packed": packed})[0]


def drawn(rng: np.random.Generator, outputs: int, blocks: int, bits: int, minimums: bool, wide: bool) -> Weights:
    low = 0 if minimums else -(1 << (bits - 1))
    kind = np.uint8 if minimums else np.int8
    integers = rng.integers(low, low + (1 << bits), (outputs, blocks * BLOCK)).astype(kind)
    integers[0, :BLOCK] = low  # -8 and -128 have no negatives of their own
    integers[-1, -BLOCK:] = low + (1 << bits) - 1

    def scales() -> NDArray[np.float32]:
        values = rng.normal(size=(outputs, blocks)).astype(np.float32) * np.float32(0.03)
        return values if wide else values.astype(np.float16).astype(np.float32)

    return integers, scales(), scales() if minimums else None


def rows(rng: np.random.Generator, count: int, blocks: int) -> NDArray[np.float32]:
    """Rows with blocks of all sizes of number, zeros and tiny ones among them."""
    x = rng.normal(size=(count, blocks, BLOCK)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-8, 9, (count, blocks, 1)).astype(np.float32)
    x[rng.random((count, blocks)) < 0.1] = 0
    x[rng.random((count, blocks)) < 0.05] *= np.float32(1e-30)
    x[rng.random((count, blocks)) < 0.05] *= np.float32(1e-38)
    return x.reshape(count, -1)


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 33),
    outputs=st.sampled_from([1, 7, 16, 32, 33, 100]),
    blocks=st.integers(1, 9),
    bits=st.sampled_from([4, 8]),
    minimums=st.booleans(),
    wide=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
)
def test_it_has_the_references_bits(seed, count, outputs, blocks, bits, minimums, wide, threads) -> None:
    rng = np.random.default_rng(seed)
    weights, x = drawn(rng, outputs, blocks, bits, minimums, wide), rows(rng, count, blocks)
    np.testing.assert_array_equal(multiply(x, weights, bits, threads), quant_matmul(x, *weights))


@pytest.mark.parametrize(("bits", "minimums"), [(4, False), (4, True), (8, False), (8, True)])
def test_a_row_has_the_same_bits_in_any_company(bits, minimums) -> None:
    rng = np.random.default_rng(bits)
    weights, x = drawn(rng, 200, 20, bits, minimums, wide=False), rows(rng, 40, 20)
    alone = np.concatenate([multiply(x[i : i + 1], weights, bits) for i in range(len(x))])
    for count in (*range(1, 34), 40):
        np.testing.assert_array_equal(multiply(x[:count], weights, bits, 1 + count % 2), alone[:count])
    np.testing.assert_array_equal(multiply(x[::-1].copy(), weights, bits), alone[::-1])


def test_any_rank_is_taken() -> None:
    rng = np.random.default_rng(0)
    weights, x = drawn(rng, 20, 2, 4, False, False), rows(rng, 6, 2)
    flat = multiply(x, weights, 4)
    np.testing.assert_array_equal(multiply(x.reshape(1, 6, -1), weights, 4)[0], flat)
    np.testing.assert_array_equal(multiply(x.reshape(2, 3, 1, -1), weights, 4).reshape(6, -1), flat)
    np.testing.assert_array_equal(multiply(x[0], weights, 4), flat[0])
    assert multiply(x[:0], weights, 4).shape == (0, 20)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_row_alone(bits, value) -> None:
    rng = np.random.default_rng(1)
    weights, x = drawn(rng, 24, 4, bits, True, False), rows(rng, 9, 4)
    clean = multiply(x, weights, bits)
    x[4, 70] = value
    found = multiply(x, weights, bits)
    assert np.isnan(found[4]).all()
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(clean, 4, 0))


def test_halves_go_to_even_numbers() -> None:
    """127 makes steps of one, so that 0.5, 1.5, 2.5 lie on the edges."""
    x = np.zeros((1, BLOCK), np.float32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127]
    weights = np.eye(BLOCK, dtype=np.int8), np.ones((BLOCK, 1), np.float32), None
    np.testing.assert_array_equal(multiply(x, weights, 8)[0, :8], [127, 0, 2, 2, 0, -2, -2, -127])


@given(
    seed=st.integers(0, 2**32 - 1),
    outputs=st.sampled_from([1, 16, 33]),
    blocks=st.integers(1, 4),
    bits=st.sampled_from([4, 8]),
    minimums=st.booleans(),
    wide=st.booleans(),
)
def test_packing_can_be_undone_and_looked_up_in(seed, outputs, blocks, bits, minimums, wide) -> None:
    rng = np.random.default_rng(seed)
    weights = drawn(rng, outputs, blocks, bits, minimums, wide)
    packed, layout = packed_weights(weights, bits)
    for before, after in zip(weights, unpack(packed, layout), strict=True):
        assert (before is None) == (after is None)
        if before is not None:
            np.testing.assert_array_equal(after, before)
    ids = rng.integers(0, outputs, (2, 5))
    (found,) = session("QuantGather", layout).run(None, {"x": ids, "packed": packed})
    np.testing.assert_array_equal(found, dequantize(*weights)[ids])


def test_the_product_is_near_that_of_the_numbers_themselves() -> None:
    """A row's quantisation is off by half a step of max / 127 at each of K inputs, at random."""
    rng = np.random.default_rng(3)
    weights = drawn(rng, 64, 16, 4, False, False)
    x = rng.normal(size=(32, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ dequantize(*weights).astype(np.float64).T
    steps = np.abs(x.reshape(32, 16, BLOCK)).max(axis=2) / 127
    spread = np.sqrt(np.einsum("mb,nb->mn", steps**2 / 12, (dequantize(*weights).reshape(64, 16, BLOCK) ** 2).sum(2)))
    assert np.abs((multiply(x, weights, 4) - exact) / spread).max() < 5


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_bodies_multiply_the_same_weights(bits, minimums, lookup) -> None:
    rng = np.random.default_rng(bits)
    integers, scales, least = drawn(rng, 24, 3, bits, minimums, True)
    kinds = {(4, False): int4, (4, True): uint4, (8, False): np.int8, (8, True): np.uint8}
    name = ("Asymmetric" if minimums else "") + ("QuantGather" if lookup else "QuantMatMul")
    constants = {"weight": integers.astype(kinds[bits, minimums]), "scales": scales}
    constants |= {} if least is None else {"minimums": least}
    x = rng.integers(0, 24, (2, 3)) if lookup else rng.normal(size=(2, 3, 96)).astype(np.float32)
    inputs = (("x", INT if lookup else FLOAT, x.ndim),)
    (found,) = body_session(name, inputs, (("y", FLOAT, 3),), constants).run(None, {"x": x})
    table = dequantize(integers, scales, least)
    np.testing.assert_allclose(found, table[x] if lookup else x @ table.T, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    packed, layout = packed_weights(drawn(np.random.default_rng(0), 16, 2, 4, False, False), 4)
    product, lookup = session("QuantMatMul", layout), session("QuantGather", layout)
    for engine, x, weights, words in (
        (product, np.zeros((2, 65), np.float32), packed, "width"),
        (product, np.zeros((2, 64), np.float32), packed[1:], "extent"),
        (lookup, np.array([[16]]), packed, "outside"),
        (lookup, np.array([[-1]]), packed, "outside"),
    ):
        with pytest.raises(Exception, match=words):
            engine.run(None, {"x": x, "packed": weights})
    for outputs, inputs, bits, words in (
        (16, 48, 4, "multiple of 32"), (16, 32, 3, "bits must be"), (16, 32, 2**32 + 4, "bits must be"),
        (0, 32, 4, "N must be"), (2**62, 64, 4, "N must be"), (16, 2**32, 4, "K must be"),
    ):  # fmt: skip
        for op in ("QuantMatMul", "QuantGather"):
            with pytest.raises(Exception, match=words):
                session(op, QuantLayout(outputs, inputs, bits, False, False))
    one, zeros, narrow = np.ones((1, 1), np.float32), np.zeros((1, 32), np.int8), QuantLayout(1, 32, 4, False, False)
    for integers, scales, minimums, words in (
        (zeros + np.int8(8), one, None, "does not fit into 4 bits"),
        (np.zeros((1, 48), np.int8), one, None, "no blocks"),
        (zeros, one / 3, None, "no number of float16"),
        (zeros, one, one, "not those of"),
    ):
        with pytest.raises(ValueError, match=words):
            pack(integers, scales, minimums, narrow)
