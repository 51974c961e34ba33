"""BranchAttention's body in standard ops, run alone as any ONNX tool would, is the NumPy reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from outrider.plugins.onnx_ops import DOMAIN, FUNCTIONS, OPSET, VERSION
from outrider.plugins.reference import bim_mask, branch_attention
from tests.compiler.steps import Arrays, flat

CAPACITY, HEAD_DIM = 32, 8


def attention_model(heads: int, kv_heads: int) -> ort.InferenceSession:
    """One BranchAttention node with its function body, as any ONNX tool would run it."""
    value, real, integer = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT64
    cache = ["R", kv_heads, CAPACITY, HEAD_DIM]
    shapes: dict[str, tuple[int, list[Any]]] = {
        "q": (real, [1, "N", heads * HEAD_DIM]),
        **dict.fromkeys(("k", "v"), (real, [1, "N", kv_heads * HEAD_DIM])),
        **dict.fromkeys(("k_cache", "v_cache"), (real, cache)),
        "attn_bias": (real, ["R", 1, "S", "T"]),
        "past_length": (integer, ["R"]),
        "row_splits": (integer, ["E"]),
    }
    outputs = [value("out", TensorProto.FLOAT, shapes["q"][1])]
    outputs += [value(f"{name}_out", TensorProto.FLOAT, cache) for name in ("k_cache", "v_cache")]
    node = helper.make_node(
        "BranchAttention",
        list(shapes),
        [output.name for output in outputs],
        domain=DOMAIN,
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=HEAD_DIM**-0.5,
    )
    graph = helper.make_graph([node], "attention", [value(n, t, s) for n, (t, s) in shapes.items()], outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(graph, functions=[FUNCTIONS["BranchAttention"]()], opset_imports=opsets)
    model.ir_version = 11
    onnx.checker.check_model(model)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@st.composite
def steps(draw: st.DrawFn, rows: int) -> tuple[list[int], list[NDArray[np.int64]], int]:
    """Past lengths, trees of new tokens (an idle row has one inert token) and keys in view, padded."""
    new = [draw(st.integers(1, 6)) for _ in range(rows)]
    past = [draw(st.integers(0, CAPACITY - 6 - max(new))) for _ in range(rows)]
    view = draw(st.integers(max(p + n for p, n in zip(past, new, strict=True)), CAPACITY))
    trees = [np.array([draw(st.integers(-1, i - 1)) for i in range(n)], np.int64) for n in new]
    return past, trees, view


def random_step(
    past: list[int], parents: list[NDArray[np.int64]], view: int, heads: int, kv_heads: int, seed: int
) -> Arrays:
    """A step of ragged rows with BimMask's bias, over caches full of garbage."""
    random = np.random.default_rng(seed)
    new = [len(parent) for parent in parents]
    places, total, rows = max(new), sum(new), len(new)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.normal(size=shape).astype(np.float32)

    bim = random.choice(np.array([-2, -1, -1, 0, 1]), (rows, CAPACITY))
    bias = bim_mask(bim, np.array(past), np.cumsum([0, *new]), np.zeros(total, np.int64), flat(parents), view, places)
    return {
        "q": normal(1, total, heads * HEAD_DIM),
        "k": normal(1, total, kv_heads * HEAD_DIM),
        "v": normal(1, total, kv_heads * HEAD_DIM),
        "k_cache": normal(rows, kv_heads, CAPACITY, HEAD_DIM),
        "v_cache": normal(rows, kv_heads, CAPACITY, HEAD_DIM),
        "attn_bias": bias,
        "past_length": np.array(past, np.int64),
        "row_splits": np.cumsum([0, *new]),
    }


@pytest.fixture(scope="module")
def attention() -> Mapping[tuple[int, int], ort.InferenceSession]:
    return {heads: attention_model(*heads) for heads in ((4, 2), (3, 3), (6, 1))}


def assert_equal_to_numpy(session: ort.InferenceSession, heads: tuple[int, int], step: Arrays) -> None:
    found = session.run(None, step)
    expected = branch_attention(**step, num_heads=heads[0], kv_num_heads=heads[1], scale=HEAD_DIM**-0.5)
    np.testing.assert_allclose(found[0], expected[0], atol=2e-6, rtol=1e-5)
    for cache, wanted in zip(found[1:], expected[1:], strict=True):
        for row, past in enumerate(step["past_length"]):
            end = past + step["row_splits"][row + 1] - step["row_splits"][row]
            np.testing.assert_array_equal(cache[row, :, :end], wanted[row, :, :end])  # after it lies garbage


@pytest.mark.parametrize("rows", [st.just(1), st.integers(2, 5)], ids=["one row", "ragged rows"])
@given(heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]), data=st.data(), seed=st.integers(0, 2**32))
def test_the_function_body_is_the_reference(attention, rows, heads, data, seed) -> None:
    step = data.draw(rows.flatmap(steps))
    assert_equal_to_numpy(attention[heads], heads, random_step(*step, *heads, seed))


def test_idle_rows_with_an_inert_token_do_not_disturb_the_others(attention) -> None:
    """Rows 0 and 2 are idle; the busy row between them is as if alone."""
    chain = np.array([-1, 0, 1, 1], np.int64)
    inert = np.array([-1], np.int64)
    step = random_step([9, 5, 0], [inert, chain, inert], 16, 4, 2, seed=7)
    assert_equal_to_numpy(attention[4, 2], (4, 2), step)
    alone = {
        **{name: step[name][:, 1:5] for name in ("q", "k", "v")},
        **{name: step[name][1:2] for name in ("k_cache", "v_cache", "attn_bias", "past_length")},
        "row_splits": np.array([0, 4]),
    }
    np.testing.assert_allclose(
        attention[4, 2].run(None, step)[0][:, 1:5], attention[4, 2].run(None, alone)[0], atol=1e-6
    )
