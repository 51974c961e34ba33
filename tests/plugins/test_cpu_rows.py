"""RmsNorm, GatedUnit and Softcap inside of ONNX Runtime by our kernels."""

from __future__ import annotations

from math import erfc, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.plugins.onnx_node import FLOAT, kernel_session

EPSILON = 1e-6
ACTIVATIONS = ("silu", "gelu_tanh")
Rows = NDArray[np.float32]
SEEDS = st.integers(0, 2**32 - 1)


def norm(x: Rows, weight: Rows, added: Rows | None = None, *, summed: bool = False) -> list[Rows]:
    given = {"x": x, "weight": weight} | ({} if added is None else {"added": added})
    inputs = tuple((name, FLOAT, array.ndim) for name, array in given.items())
    outputs = (("normed", FLOAT, 3), ("sum", FLOAT, 3))[: 1 + summed]
    return kernel_session("RmsNorm", inputs, outputs, epsilon=EPSILON).run(None, given)  # type: ignore[no-any-return]


def gated_unit(activation: str, x: Rows) -> Rows:
    (found,) = kernel_session(
        "GatedUnit", (("x", FLOAT, 3),), (("y", FLOAT, 3),), activation=activation
    ).run(None, {"x": x})  # fmt: skip
    return found  # type: ignore[no-any-return]


def softcap(x: Rows, cap: float) -> Rows:
    (found,) = kernel_session("Softcap", (("x", FLOAT, 2),), (("y", FLOAT, 2),), cap=cap).run(None, {"x": x})
    return found  # type: ignore[no-any-return]


def squares(row: Rows) -> np.float32:
    """The kernel's order: vectors of 16 by turns to four sums, (0 + 2) + (1 + 3) of lanes, quarters and sums."""
    padded = np.zeros(-(-len(row) // 64) * 64)
    padded[: len(row)] = row
    sums = np.zeros((4, 16), np.float32)
    for turn in padded.reshape(-1, 4, 16):  # a square is exact in float64, and so the sum is rounded once, or nearly so
        sums = (turn * turn + sums.astype(np.float64)).astype(np.float32)

    def paired(x: Rows) -> Rows:
        return (x[..., 0] + x[..., 2]) + (x[..., 1] + x[..., 3])

    return np.float32(paired(paired(paired(sums.reshape(4, 4, 4)))))


@given(
    rows=st.integers(1, 40),
    size=st.sampled_from([1, 3, 15, 16, 17, 48, 64, 100, 256, 1000, 2048]),
    scale=st.sampled_from([1e-6, 0.1, 3.0, 1e4]),
    added=st.booleans(),
    summed=st.booleans(),
    seed=SEEDS,
)
def test_norms_are_of_the_sum_row_by_row(rows, size, scale, added, summed, seed) -> None:
    rng = np.random.default_rng(seed)
    x, other = ((rng.normal(size=(1, rows, size)) * scale).astype(np.float32) for _ in range(2))
    weight = rng.normal(size=size).astype(np.float32)
    found, *sums = norm(x, weight, other if added else None, summed=added and summed)
    whole = x + other if added else x
    for total in sums:
        np.testing.assert_array_equal(total, whole)
    exact = whole.astype(np.float64)
    wanted = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON) * weight
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=1e-30)
    (alone, *_) = norm(x[:, -1:], weight, other[:, -1:] if added else None, summed=added and summed)
    np.testing.assert_array_equal(alone[0, 0], found[0, -1])


@pytest.mark.parametrize("size", [5, 16, 200, 1024])
def test_squares_are_added_in_the_order_that_is_written_down(size) -> None:
    rng = np.random.default_rng(size)
    x, weight = rng.normal(size=(1, 50, size)).astype(np.float32), np.ones(size, np.float32)
    (found,) = norm(x, weight)
    sums = np.array([squares(row) for row in x[0]], np.float32)
    factors = np.float32(1) / np.sqrt(sums / np.float32(size) + np.float32(EPSILON))
    np.testing.assert_array_equal(found[0], x[0] * factors[:, None])


def activated(activation: str, gate: NDArray[np.float64]) -> NDArray[np.float64]:
    """In a form that keeps its digits where it is small: (1 + tanh u) / 2 is 1 / (1 + exp(-2u))."""
    steep = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(np.minimum(-steep, 700)))


@given(
    activation=st.sampled_from(ACTIVATIONS),
    rows=st.integers(1, 40),
    size=st.sampled_from([1, 3, 15, 16, 17, 100, 1024]),
    scale=st.sampled_from([0.1, 3.0, 60.0, 1e4]),
    seed=SEEDS,
)
def test_gated_units_are_the_activation_of_the_gate_times_up_row_by_row(activation, rows, size, scale, seed) -> None:
    x = (np.random.default_rng(seed).normal(size=(1, rows, 2 * size)) * scale).astype(np.float32)
    found = gated_unit(activation, x)
    wanted = activated(activation, x[..., :size].astype(np.float64)) * x[..., size:]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-35 * max(1.0, scale * scale))
    np.testing.assert_array_equal(gated_unit(activation, x[:, -1:])[0, 0], found[0, -1])


def test_gelu_by_tanh_is_that_of_pytorch() -> None:
    gate = np.linspace(-8, 8, 4001, dtype=np.float32)
    found = gated_unit("gelu_tanh", np.concatenate([gate, np.ones_like(gate)])[None, None])
    wanted = torch.nn.functional.gelu(torch.from_numpy(gate).double(), approximate="tanh").numpy()
    np.testing.assert_allclose(found[0, 0], wanted, rtol=2e-6, atol=1e-14)
    exact = np.array([x * erfc(-x / sqrt(2)) / 2 for x in gate.astype(np.float64).tolist()])
    assert 1e-4 < np.abs(found[0, 0] - exact).max() < 1e-3  # it is the other one


def sweep() -> Rows:
    """Numbers of every size and both signs, the places where the rule of tanh changes among them."""
    random = np.random.default_rng(0)
    sizes = np.concatenate([
        np.logspace(-45, 38.5, 20011), np.linspace(0, 12, 50021), random.uniform(0.6, 0.65, 5003),
        [0.625, 9.01, 43.5, 44.0, 1e-45, 1.17549435e-38, 3.4e38, np.inf, 0.0],
    ])  # fmt: skip
    sizes = sizes.astype(np.float32)
    edges = np.nextafter(np.float32([0.625, 0.625]), np.float32([0, 1]))
    sizes = np.concatenate([sizes, edges])
    return np.concatenate([sizes, -sizes])


def test_tanh_is_within_two_units_in_the_last_place_and_keeps_signs_and_nan() -> None:
    x = sweep()
    found, wanted = softcap(x[None], 1.0)[0], np.tanh(x.astype(np.float64))
    ulps = np.abs(found.astype(np.float64) - wanted) / np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    assert ulps.max() <= 2
    assert np.abs(found).max() == 1
    x = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-30, np.nan], np.float32)
    found = softcap(x[None], 1.0)[0]
    np.testing.assert_array_equal(found, np.array([0, 0, 1, -1, 1e-45, -1e-45, 1e-30, np.nan], np.float32))
    np.testing.assert_array_equal(np.signbit(found[:6]), [False, True, False, True, False, True])


@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 15, 16, 17, 1000, 8191, 8192, 20011]),
    cap=st.sampled_from([30.0, 50.0, 0.3]),
    seed=SEEDS,
)
def test_a_row_is_capped_wherever_it_lies(rows, width, cap, seed) -> None:
    x = (np.random.default_rng(seed).normal(size=(rows, width)) * 40).astype(np.float32)
    found = softcap(x, cap)
    np.testing.assert_allclose(found, cap * np.tanh(x.astype(np.float64) / np.float32(cap)), rtol=4e-7)
    for row in range(rows):
        np.testing.assert_array_equal(softcap(x[row : row + 1], cap)[0].view(np.uint32), found[row].view(np.uint32))


def test_sizes_and_attributes_that_do_not_fit_are_refused() -> None:
    x, odd = np.zeros((1, 2, 16), np.float32), np.zeros((1, 2, 7), np.float32)
    for run, words in (
        (lambda: norm(x, np.ones(15, np.float32)), "extent"),
        (lambda: norm(x, np.ones(16, np.float32), x[:, :1]), "differ"),
        (lambda: gated_unit("silu", odd), "one size"),
        (lambda: gated_unit("relu", x), "no such activation"),
        (lambda: softcap(x[0], 0.0), "cap must be positive"),
    ):
        with pytest.raises(Exception, match=words):
            run()
