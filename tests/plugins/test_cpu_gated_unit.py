"""SwiGlu inside of ONNX Runtime by our kernel."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from plugins.onnxruntime_ops import cpu_library
from plugins.schema import CPU_DOMAIN


@cache
def swiglu() -> ort.InferenceSession:
    node = helper.make_node("SwiGlu", ["x"], ["y"], domain=CPU_DOMAIN)
    graph = helper.make_graph(
        [node],
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, None, None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None, None])],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    size=st.sampled_from([1, 3, 15, 16, 17, 100, 1024]),
    scale=st.sampled_from([0.1, 3.0, 60.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_silu_of_the_gate_times_up_row_by_row(rows, size, scale, seed) -> None:
    x = (np.random.default_rng(seed).normal(size=(1, rows, 2 * size)) * scale).astype(np.float32)
    (found,) = swiglu().run(None, {"x": x})
    gate, up = x[..., :size].astype(np.float64), x[..., size:].astype(np.float64)
    wanted = gate / (1 + np.exp(np.minimum(-gate, 700))) * up
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-35 * max(1.0, scale * scale))
    (alone,) = swiglu().run(None, {"x": x[:, -1:]})
    np.testing.assert_array_equal(alone[0, 0], found[0, -1])


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(Exception, match="one size"):
        swiglu().run(None, {"x": np.zeros((1, 2, 7), np.float32)})
