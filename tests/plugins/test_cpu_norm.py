"""RmsNorm inside of ONNX Runtime by our kernel."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from outrider.plugins.schema import CPU_DOMAIN
from tests.cpu_session import cpu_session

EPSILON = 1e-6
Rows = NDArray[np.float32]


@cache
def session(added: bool, summed: bool) -> ort.InferenceSession:
    inputs = ["x", "weight", *(["added"] if added else [])]
    outputs = ["normed", *(["sum"] if summed else [])]
    graph = helper.make_graph(
        [helper.make_node("RmsNorm", inputs, outputs, domain=CPU_DOMAIN, epsilon=EPSILON)],
        "norm",
        [helper.make_tensor_value_info(i, TensorProto.FLOAT, [None] * (1 if i == "weight" else 3)) for i in inputs],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * 3) for output in outputs],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return cpu_session(model.SerializeToString(), threads=0)


def norm(x: Rows, weight: Rows, added: Rows | None = None, *, summed: bool = False) -> list[Rows]:
    given = {"x": x, "weight": weight} | ({} if added is None else {"added": added})
    return session(added is not None, summed).run(None, given)  # type: ignore[no-any-return]


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
    seed=st.integers(0, 2**32 - 1),
)
def test_it_norms_the_sum_row_by_row(rows, size, scale, added, summed, seed) -> None:
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


@pytest.mark.parametrize("size", [5, 16, 64, 200, 1024])
def test_squares_are_added_in_the_order_that_is_written_down(size) -> None:
    rng = np.random.default_rng(size)
    x, weight = rng.normal(size=(1, 50, size)).astype(np.float32), np.ones(size, np.float32)
    (found,) = norm(x, weight)
    sums = np.array([squares(row) for row in x[0]], np.float32)
    factors = np.float32(1) / np.sqrt(sums / np.float32(size) + np.float32(EPSILON))
    np.testing.assert_array_equal(found[0], x[0] * factors[:, None])


def test_other_sizes_are_refused() -> None:
    x = np.zeros((1, 2, 16), np.float32)
    with pytest.raises(Exception, match="extent"):
        norm(x, np.ones(15, np.float32))
    with pytest.raises(Exception, match="differ"):
        norm(x, np.ones(16, np.float32), np.zeros((1, 1, 16), np.float32))
