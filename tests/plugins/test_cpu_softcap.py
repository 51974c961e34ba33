"""Softcap inside of ONNX Runtime by our kernel, and the tanh that it is made of."""

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


@cache
def session(cap: float) -> ort.InferenceSession:
    node = helper.make_node("Softcap", ["x"], ["y"], domain=CPU_DOMAIN, cap=cap)
    graph = helper.make_graph(
        [node],
        "softcap",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return cpu_session(model.SerializeToString(), threads=0)


def softcap(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]:
    (found,) = session(cap).run(None, {"x": x})
    assert isinstance(found, np.ndarray)
    return found


def sweep() -> NDArray[np.float32]:
    """Numbers of every size and both signs, the places where the rule changes among them, and the degenerate ones."""
    random = np.random.default_rng(0)
    sizes = np.concatenate([
        np.logspace(-45, 38.5, 20011), np.linspace(0, 12, 50021), random.uniform(0.6, 0.65, 5003),
        [0.625, 9.01, 43.5, 44.0, 1e-45, 1.17549435e-38, 3.4e38, np.inf, 0.0],
    ])  # fmt: skip
    sizes = sizes.astype(np.float32)
    edges = np.nextafter(np.float32([0.625, 0.625]), np.float32([0, 1]))
    sizes = np.concatenate([sizes, edges])
    return np.concatenate([sizes, -sizes])


def ulps(found: NDArray[np.float32], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.abs(found.astype(np.float64) - wanted) / np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)


def test_tanh_is_within_two_units_in_the_last_place() -> None:
    x = sweep()
    found = softcap(x[None], 1.0)[0]
    assert ulps(found, np.tanh(x.astype(np.float64))).max() <= 2
    assert np.abs(found).max() == 1


def test_tanh_keeps_signs_and_says_what_is_no_number() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1e-30, np.nan], np.float32)
    found = softcap(x[None], 1.0)[0]
    np.testing.assert_array_equal(found, np.array([0, 0, 1, -1, 1e-45, -1e-45, 1e-30, np.nan], np.float32))
    np.testing.assert_array_equal(np.signbit(found[:6]), [False, True, False, True, False, True])


@given(
    rows=st.integers(1, 9),
    width=st.sampled_from([1, 15, 16, 17, 1000, 8191, 8192, 20011]),
    cap=st.sampled_from([30.0, 50.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_is_capped_wherever_it_lies(rows, width, cap, seed) -> None:
    x = (np.random.default_rng(seed).normal(size=(rows, width)) * 40).astype(np.float32)
    found = softcap(x, cap)
    wanted = cap * np.tanh(x.astype(np.float64) / np.float32(cap))
    np.testing.assert_allclose(found, wanted, rtol=4e-7)
    for row in range(rows):
        np.testing.assert_array_equal(softcap(x[row : row + 1], cap)[0].view(np.uint32), found[row].view(np.uint32))


def test_a_cap_that_caps_nothing_is_refused() -> None:
    with pytest.raises(Exception, match="cap must be positive"):
        session(0.0)
