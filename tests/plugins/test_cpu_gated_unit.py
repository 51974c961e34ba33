"""GatedUnit inside of ONNX Runtime by our kernel, with each of its activations."""

from __future__ import annotations

from functools import cache
from math import erfc, sqrt

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from outrider.plugins.schema import CPU_DOMAIN
from tests.cpu_session import cpu_session

ACTIVATIONS = ("silu", "gelu_tanh")


@cache
def gated_unit(activation: str) -> ort.InferenceSession:
    node = helper.make_node("GatedUnit", ["x"], ["y"], domain=CPU_DOMAIN, activation=activation)
    graph = helper.make_graph(
        [node],
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, None, None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None, None])],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    return cpu_session(model.SerializeToString(), threads=0)


def activated(activation: str, gate: NDArray[np.float64]) -> NDArray[np.float64]:
    """In a form that keeps its digits where it is small: (1 + tanh u) / 2 is 1 / (1 + exp(-2u))."""
    steep = gate if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(np.minimum(-steep, 700)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(
    rows=st.integers(1, 40),
    size=st.sampled_from([1, 3, 15, 16, 17, 100, 1024]),
    scale=st.sampled_from([0.1, 3.0, 60.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_activation_of_the_gate_times_up_row_by_row(activation, rows, size, scale, seed) -> None:
    x = (np.random.default_rng(seed).normal(size=(1, rows, 2 * size)) * scale).astype(np.float32)
    (found,) = gated_unit(activation).run(None, {"x": x})
    wanted = activated(activation, x[..., :size].astype(np.float64)) * x[..., size:]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-35 * max(1.0, scale * scale))
    (alone,) = gated_unit(activation).run(None, {"x": x[:, -1:]})
    np.testing.assert_array_equal(alone[0, 0], found[0, -1])


def test_gelu_by_tanh_is_that_of_pytorch() -> None:
    import torch

    gate = np.linspace(-8, 8, 4001, dtype=np.float32)
    (found,) = gated_unit("gelu_tanh").run(None, {"x": np.concatenate([gate, np.ones_like(gate)])[None, None]})
    wanted = torch.nn.functional.gelu(torch.from_numpy(gate).double(), approximate="tanh").numpy()
    np.testing.assert_allclose(found[0, 0], wanted, rtol=2e-6, atol=1e-14)
    exact = np.array([x * erfc(-x / sqrt(2)) / 2 for x in gate.astype(np.float64).tolist()])
    assert 1e-4 < np.abs(found[0, 0] - exact).max() < 1e-3  # it is the other one


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(Exception, match="one size"):
        gated_unit("silu").run(None, {"x": np.zeros((1, 2, 7), np.float32)})


def test_another_activation_is_refused() -> None:
    with pytest.raises(Exception, match="silu or gelu_tanh"):
        gated_unit("relu")
