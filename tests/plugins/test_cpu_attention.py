"""Attention inside of ONNX Runtime by our kernel: the reference's result, and the same bits in any company."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from plugins.onnxruntime_ops import THREADS, cpu_library
from plugins.reference import branch_attention
from plugins.schema import CPU_DOMAIN

LOWEST = np.finfo(np.float32).min
TYPES = {
    "float32": (TensorProto.FLOAT, np.float32, 2e-6),
    "float16": (TensorProto.FLOAT16, np.float16, 2e-3),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16, 2e-2),
}  # and how far a result in it may be off: its own rounding
INPUTS = (
    "q", "k", "v", "k_cache", "v_cache", "attn_bias", "past_length", "row_splits", "positions", "cos", "sin", "q_norm",
    "k_norm",
)  # fmt: skip
OUTPUTS = ("out", "k_cache_out", "v_cache_out")
Arrays = dict[str, NDArray[Any]]


@cache
def session(
    given: tuple[tuple[str, int, int], ...], outputs: int, threads: int, **attributes: float
) -> ort.InferenceSession:
    """One node whose inputs are `(name, type, rank)`; the others are absent."""
    known = {name for name, _, _ in given}
    node = helper.make_node(
        "BranchAttention", [name if name in known else "" for name in INPUTS], OUTPUTS, domain=CPU_DOMAIN, **attributes
    )
    ranks = (3, 4, 4)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind, [None] * rank) for name, kind, rank in given],
        [
            helper.make_tensor_value_info(name, outputs, [None] * rank)
            for name, rank in zip(OUTPUTS, ranks, strict=True)
        ],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(CPU_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if threads != 2:  # then it is as many as the machine has
        options.add_session_config_entry(THREADS, str(threads))
    options.log_severity_level = 4
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def attend(inputs: Arrays, heads: int, kv_heads: int, *, threads: int = 2, epsilon: float = 1e-6) -> list[NDArray[Any]]:
    """The outputs, in the KV cache's type."""
    kind = {np.dtype(dtype): proto for proto, dtype, _ in TYPES.values()}
    proto = kind | {np.dtype(np.int64): TensorProto.INT64}
    given = tuple((name, proto[inputs[name].dtype], inputs[name].ndim) for name in INPUTS if name in inputs)
    cache_type = proto[inputs["k_cache"].dtype]
    scale = inputs["k_cache"].shape[-1] ** -0.5
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": scale, "epsilon": epsilon}
    engine = session(given, cache_type, threads, **attributes)
    bound = engine.io_binding()
    for name, _, _ in given:
        value = np.ascontiguousarray(inputs[name])
        if value.dtype == ml_dtypes.bfloat16:
            bound.bind_ortvalue_input(
                name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value.view(np.uint16), TensorProto.BFLOAT16)
            )
        else:
            bound.bind_cpu_input(name, value)
    query = inputs["q"].shape[1]
    shapes = [(1, query, heads * inputs["k_cache"].shape[-1]), inputs["k_cache"].shape, inputs["v_cache"].shape]
    found = [np.zeros(shape, inputs["k_cache"].dtype) for shape in shapes]
    for name, array in zip(OUTPUTS, found, strict=True):
        bound.bind_output(name, "cpu", 0, cache_type, array.shape, array.ctypes.data)
    engine.run_with_iobinding(bound)
    return found


def step(
    random: np.random.Generator,
    heads: int,
    kv_heads: int,
    size: int,
    new: list[int],
    past: list[int],
    spare: int,
    branches: int = 0,
) -> Arrays:
    """A step of ragged rows that see a random part of their past and of themselves.

    With `branches`, what they see are a prefix, their branch's keys among the others', and some are dead.
    """
    total, rows, view = sum(new), len(new), max(p + n for p, n in zip(past, new, strict=True)) + spare
    shape = (rows, kv_heads, view + 3, size)
    bias = np.full((rows, 1, max(new), view), LOWEST)
    for row, (n, p) in enumerate(zip(new, past, strict=True)):
        owner = random.integers(-1, max(branches, 1), p + n)  # -1: of nobody any more
        owner[p:] = np.maximum(owner[p:], 0)
        prefix = np.arange(p + n) < random.integers(p + 1)
        for place in range(n):
            seen = prefix | (owner == owner[p + place]) if branches else random.random(p + n) < 0.7
            bias[row, 0, place, : p + place] = np.where(seen[: p + place], 0, LOWEST)
            bias[row, 0, place, p + place] = 0
    return {
        "q": random.normal(size=(1, total, heads * size)).astype(np.float32),
        "k": random.normal(size=(1, total, kv_heads * size)).astype(np.float32),
        "v": random.normal(size=(1, total, kv_heads * size)).astype(np.float32),
        "k_cache": random.normal(size=shape).astype(np.float32),
        "v_cache": random.normal(size=shape).astype(np.float32),
        "attn_bias": bias.astype(np.float32),
        "past_length": np.array(past, np.int64),
        "row_splits": np.cumsum([0, *new]),
    }


def typed(inputs: Arrays, numpy_type: Any) -> Arrays:
    """The same in another type of numbers, but for the bias."""
    return {n: x.astype(numpy_type) if x.dtype == np.float32 and n != "attn_bias" else x for n, x in inputs.items()}


def expected(inputs: Arrays, heads: int, kv_heads: int) -> tuple[NDArray[Any], ...]:
    scale = inputs["k_cache"].shape[-1] ** -0.5
    return branch_attention(
        **{name: inputs[name] for name in INPUTS[:8]}, num_heads=heads, kv_num_heads=kv_heads, scale=scale
    )


HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1), (5, 1), (32, 1)])
SIZES = st.sampled_from([2, 4, 8, 20, 24, 64, 80, 128])
BRANCHES = st.sampled_from([0, 1, 1, 3, 8])  # one is a chain, whose tokens see all before them


@settings(max_examples=150, deadline=None)
@given(
    heads=HEADS,
    size=SIZES,
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=4).filter(
        lambda rows: any(new for new, _ in rows)
    ),
    spare=st.integers(0, 17),
    branches=BRANCHES,
    dtype=st.sampled_from(sorted(TYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_gives_what_the_reference_gives(heads, size, rows, spare, branches, dtype, seed) -> None:
    _, numpy_type, tolerance = TYPES[dtype]
    new, past = ([row[i] for row in rows] for i in (0, 1))
    inputs = typed(step(np.random.default_rng(seed), *heads, size, new, past, spare, branches), numpy_type)
    found = attend(inputs, *heads)
    wanted = expected(inputs, *heads)
    np.testing.assert_allclose(
        found[0].astype(np.float32), wanted[0].astype(np.float32), rtol=tolerance, atol=4 * tolerance
    )
    for found_cache, wanted_cache in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(found_cache, wanted_cache)


@settings(max_examples=150, deadline=None)
@given(
    heads=HEADS,
    size=SIZES,
    new=st.integers(1, 40),
    past=st.integers(0, 300),
    gaps=st.integers(0, 60),
    branches=BRANCHES,
    dtype=st.sampled_from(sorted(TYPES)),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_token_is_the_same_bits_alone_and_in_any_company(
    heads, size, new, past, gaps, branches, dtype, threads, seed
) -> None:
    """What a token sees is moved behind other tokens' keys, and computed alone: not a bit changes."""
    random = np.random.default_rng(seed)
    many = typed(step(random, *heads, size, [new], [past], random.integers(0, 20), branches), TYPES[dtype][1])
    together, k_cache, v_cache = attend(many, *heads, threads=threads)
    token = int(random.integers(new))
    seen = np.flatnonzero(many["attn_bias"][0, 0, token] == 0)[:-1]  # but itself, which is appended
    at = np.sort(random.choice(len(seen) + gaps, len(seen), replace=False))
    length = len(seen) + gaps
    one = {name: many[name][:, token : token + 1] for name in ("q", "k", "v")}
    for name, plane in (("k_cache", k_cache), ("v_cache", v_cache)):
        one[name] = (random.normal(size=(1, heads[1], length + 5, size)) * 1e4).astype(plane.dtype)
        one[name][:, :, at] = plane[:, :, seen]
    bias = np.full((1, 1, 1, length + 1), LOWEST, np.float32)
    bias[..., at] = bias[..., length] = 0
    alone = attend(one | {"attn_bias": bias, "past_length": np.array([length])}, *heads)[0]
    np.testing.assert_array_equal(alone[0, 0].view(np.uint8), together[0, token].view(np.uint8))


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("packed", [False, True])
def test_it_norms_and_rotates_queries_and_keys(dtype, packed) -> None:
    heads, kv_heads, size, epsilon = 6, 2, 16, 1e-5
    _, numpy_type, tolerance = TYPES[dtype]
    random = np.random.default_rng(4)
    inputs = step(random, heads, kv_heads, size, [7], [9], 2)
    del inputs["row_splits"]
    angles = random.normal(size=(40, size // 2)).astype(np.float32)
    inputs |= {
        "positions": random.integers(0, 40, (1, 7)),
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "q_norm": random.normal(size=size).astype(np.float32),
        "k_norm": random.normal(size=size).astype(np.float32),
    }
    inputs = {n: x.astype(numpy_type) if x.dtype == np.float32 and n != "attn_bias" else x for n, x in inputs.items()}

    def ready(x: NDArray[Any], norm: NDArray[Any]) -> NDArray[Any]:
        by_head = x.astype(np.float64).reshape(1, 7, -1, size)
        normed = by_head / np.sqrt((by_head**2).mean(-1, keepdims=True) + epsilon) * norm.astype(np.float64)
        low, high = normed[..., : size // 2], normed[..., size // 2 :]
        cos, sin = (inputs[name].astype(np.float64)[inputs["positions"][0], None] for name in ("cos", "sin"))
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1).reshape(x.shape)

    q, k = ready(inputs["q"], inputs["q_norm"]), ready(inputs["k"], inputs["k_norm"])
    plain = inputs | {"q": q, "k": k.astype(numpy_type), "row_splits": np.array([0, 7])}
    wanted = expected(plain, heads, kv_heads)
    if packed:
        inputs["q"] = np.concatenate([inputs.pop("q"), inputs.pop("k"), inputs.pop("v")], axis=-1)
    found = attend(inputs, heads, kv_heads, epsilon=epsilon)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            got.astype(np.float32), want.astype(np.float32), rtol=4 * tolerance, atol=8 * tolerance
        )


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    inputs = step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0)
    inputs["attn_bias"][0, 0, 1] = LOWEST
    out = attend(inputs, 4, 2)[0]
    assert not out[0, 1].any()
    assert out[0, 0].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"past_length": np.array([60])}, "exceed the KV cache"),
        ({"past_length": np.array([-1])}, "exceed the KV cache"),
        ({"row_splits": np.array([0, 9])}, "row_splits"),
        ({"row_splits": np.array([2, 1])}, "row_splits"),
        ({"attn_bias": np.zeros((1, 1, 2, 10), np.float32)}, "places"),
        ({"attn_bias": np.zeros((1, 1, 3, 99), np.float32)}, "wider than the KV cache"),
        ({"attn_bias": np.zeros((2, 1, 3, 10), np.float32)}, "rows"),
        ({"q": np.zeros((1, 3, 40), np.float32)}, "width"),
        ({"positions": np.zeros((1, 3), np.int64)}, "rotations"),
        ({"k": np.zeros((1, 2, 16), np.float32)}, "extent 2 in place of 3"),
        ({"v_cache": np.zeros((1, 2, 5, 8), np.float32)}, "extent 5 in place of"),
        ({"past_length": np.array([2**63 - 2])}, "exceed the KV cache"),
        ({"past_length": np.array([1, 1])}, "extent 2 in place of 1"),
        ({"row_splits": np.array([0, 2])}, "do not cover"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(change, words) -> None:
    session.cache_clear()  # shapes are looked at when they change
    inputs = step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0) | change
    with pytest.raises(Exception, match=words):
        attend(inputs, 4, 2)


def test_positions_without_a_rotation_are_refused() -> None:
    inputs = step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0)
    inputs |= {name: np.ones((6, 4), np.float32) for name in ("cos", "sin")}
    with pytest.raises(Exception, match="no rotation"):
        attend(inputs | {"positions": np.array([[4, 5, 6]])}, 4, 2)


@pytest.mark.skipif("OUTRIDER_ISA" in os.environ, reason="runs the others with other instructions")
@pytest.mark.parametrize("isa", ["avx2", pytest.param("plain", marks=pytest.mark.long)])
def test_lesser_machines_do_the_same(isa) -> None:
    others = "test_tree_ops.py", "test_cpu_gated_unit.py"
    files = [Path(__file__), *(Path(__file__).with_name(name) for name in others)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(str, files)],
        env=os.environ | {"OUTRIDER_ISA": isa}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:]
