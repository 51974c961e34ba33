"""WindowBias: the reference by its definition, and the body in standard ops as any ONNX tool would run it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from outrider.compiler.export.tracing import trace
from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from outrider.plugins.reference import bim_mask, window_bias

LOWEST = np.finfo(np.float32).min


def body(window: int) -> ort.InferenceSession:
    node = helper.make_node("WindowBias", ["attn_bias"], ["window_bias"], domain=DOMAIN, window=window)
    value = helper.make_tensor_value_info
    shape = ["R", 1, "S", "T"]
    graph = helper.make_graph(
        [node],
        "window",
        [value("attn_bias", TensorProto.FLOAT, shape)],
        [value("window_bias", TensorProto.FLOAT, shape)],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, functions=[FUNCTIONS["WindowBias"]()], opset_imports=opsets, ir_version=11)
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 70)),
    window=st.sampled_from([1, 2, 7, 64, 1000]),
    density=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_last_visible_keys_stay_visible(shape, window, density, seed) -> None:
    rows, places, view = shape
    visible = np.random.default_rng(seed).random((rows, 1, places, view)) < density
    bias = np.where(visible, np.float32(0), LOWEST)
    found = window_bias(bias, window)
    assert found.dtype == np.float32
    for before, after in zip(bias.reshape(-1, view), found.reshape(-1, view), strict=True):
        kept = np.flatnonzero(before == 0)[-window:]
        np.testing.assert_array_equal(np.flatnonzero(after == 0), kept)
        assert set(after[after != 0].tolist()) <= {float(LOWEST)}
    np.testing.assert_array_equal(body(window).run(None, {"attn_bias": bias})[0], found)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_node_of_a_tree_sees_the_last_tokens_of_its_own_path(window: int) -> None:
    """A branch's committed keys lie among those of another; positions along the path say what the window holds."""
    bim = np.array([[-1, -1, 0, 1, 0, 1, 1, 0, -2, -2, -2, -2, -2, -2]])
    parent = np.array([-1, 0, 0, 1, 2], np.int64)
    branch = np.zeros(5, np.int64)
    bias = bim_mask(bim, np.array([8]), np.array([0, 5]), branch, parent, 14, 5)
    path = [0, 1, 2, 4, 7]
    found = window_bias(bias, window)
    for node in range(5):
        line, at = [], node
        while at >= 0:
            line, at = [8 + at, *line], int(parent[at])
        np.testing.assert_array_equal(np.flatnonzero(found[0, 0, node] == 0), [*path, *line][-window:])


def test_it_is_exported_as_one_node() -> None:
    class Module(torch.nn.Module):
        def forward(self, bias: torch.Tensor) -> torch.Tensor:
            return torch.ops.outrider.window_bias(bias, 4)

    dynamic = {"bias": {2: torch.export.Dim("S", min=2), 3: torch.export.Dim("T", min=2)}}
    model = trace(Module(), {"bias": torch.zeros(1, 1, 3, 9)}, dynamic, {"out": (1, 1, "S", "T")})
    (node,) = model.graph
    assert (node.domain, node.op_type, node.attributes["window"].as_int()) == (DOMAIN, "WindowBias", 4)
