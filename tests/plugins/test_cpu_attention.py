"""Attention inside of ONNX Runtime by our kernel: the reference's result, and the same bits in any company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from outrider.plans.buffers import DType
from outrider.plans.kv_slots import slot_size
from outrider.plugins.ops.branch_attention import branch_attention
from outrider.plugins.ops.window_bias import window_bias
from outrider.plugins.reference import attend as attend_to_the_bit
from outrider.plugins.reference import from_slots, to_slots
from tests.plugins.onnx_node import FLOAT, INT, kernel_session

LOWEST = np.finfo(np.float32).min
TYPES = {"float32": FLOAT, "float16": TensorProto.FLOAT16, "int8": TensorProto.INT8}  # of KV caches
PROTOS = {np.dtype(name): proto for name, proto in (TYPES | {"int64": INT}).items()}
CACHES = ("k_cache", "v_cache")
TOLERANCE = 2e-6
INPUTS = (
    "q", "k", "v", "k_cache", "v_cache", "attn_bias", "past_length", "row_splits", "positions", "cos", "sin", "q_norm",
    "k_norm", "sinks",
)  # fmt: skip
OUTPUTS = ("out", "k_cache_out", "v_cache_out")
Arrays = dict[str, NDArray[Any]]


def attend(
    inputs: Arrays, heads: int, kv_heads: int, *, threads: int = 0, epsilon: float = 1e-6, **others: float
) -> list[NDArray[Any]]:
    """The outputs; `others` are attributes beside those that every node has."""
    given = {name: np.ascontiguousarray(inputs[name]) for name in INPUTS if name in inputs}
    kind, size = inputs["k_cache"].dtype, head_dim(inputs)
    engine = kernel_session(
        "BranchAttention",
        tuple((n, PROTOS[given[n].dtype], given[n].ndim) if n in given else ("", 0, 0) for n in INPUTS),
        tuple(zip(OUTPUTS, (FLOAT, PROTOS[kind], PROTOS[kind]), (3, 4, 4), strict=True)),
        threads, num_heads=heads, kv_num_heads=kv_heads, scale=max(size, 1) ** -0.5, epsilon=epsilon, **others,
    )  # fmt: skip
    bound = engine.io_binding()
    for name, array in given.items():
        bound.bind_cpu_input(name, array)
    out = np.zeros((1, inputs["q"].shape[1], heads * size), np.float32)
    found = [out, *(np.zeros(inputs[name].shape, kind) for name in CACHES)]
    for name, array in zip(OUTPUTS, found, strict=True):
        bound.bind_output(name, "cpu", 0, PROTOS[array.dtype], array.shape, array.ctypes.data)
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

    With `branches`, what they see are a stretch that all share, half of the time from the first key on, their branch's
    keys among the others', and some are dead.
    """
    total, rows, view = sum(new), len(new), max(p + n for p, n in zip(past, new, strict=True)) + spare
    shape = (rows, kv_heads, view + 3, size)
    bias = np.full((rows, 1, max(new), view), LOWEST)
    for row, (n, p) in enumerate(zip(new, past, strict=True)):
        owner = random.integers(-1, max(branches, 1), p + n)  # -1: of nobody any more
        owner[p:] = np.maximum(owner[p:], 0)
        first, end = sorted(random.integers(p + 1, size=2) * (random.integers(2), 1))
        shared = (np.arange(p + n) >= first) & (np.arange(p + n) < end)
        for place in range(n):
            seen = shared | (owner == owner[p + place]) if branches else random.random(p + n) < 0.7
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


def head_dim(inputs: Arrays) -> int:
    slots = inputs["k_cache"]
    return slots.shape[-1] - slot_size(DType(slots.dtype.name), 0)


def typed(inputs: Arrays, kind: str) -> Arrays:
    """The same with KV caches of another type."""
    return inputs | {name: to_slots(inputs[name], kind) for name in CACHES}


def expected(
    inputs: Arrays, heads: int, kv_heads: int, window: int = 0, softcap: float = 0.0
) -> tuple[NDArray[Any], ...]:
    scale = head_dim(inputs) ** -0.5
    taken = {name: inputs[name] for name in (*INPUTS[:8], "sinks") if name in inputs}
    if window:
        taken["attn_bias"] = window_bias(taken["attn_bias"], window)
    return branch_attention(taken, num_heads=heads, kv_num_heads=kv_heads, scale=scale, softcap=softcap)


def expected_bits(
    inputs: Arrays,
    caches: list[NDArray[Any]],
    token: int,
    head: int,
    kv_head: int,
    window: int = 0,
    softcap: float = 0.0,
) -> NDArray[np.float32]:
    """What one head of a token of the only row gets of `caches`, those that the step leaves."""
    size = head_dim(inputs)
    bias = inputs["attn_bias"][0, 0, token]
    seen = np.flatnonzero(bias == 0)[-window:]
    keys, values = (from_slots(slots[0, kv_head, seen]) for slots in caches)
    sink = inputs["sinks"][head] if "sinks" in inputs else None
    query = inputs["q"][0, token, head * size : (head + 1) * size]
    return attend_to_the_bit(query, keys, values, scale=size**-0.5, softcap=softcap, sink=sink)


def capped_step(
    random: np.random.Generator, heads: tuple[int, int], sinks: bool, loud: float, inputs: Arrays
) -> Arrays:
    """The step with queries that are `loud`, so that a cap has something to do, and with sinks or without."""
    changed = inputs | {"q": inputs["q"] * np.float32(loud)}
    if sinks:
        changed["sinks"] = (random.normal(size=heads[0]) * 3).astype(np.float32)
    return changed


HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1), (5, 1), (32, 1)])
SIZES = st.sampled_from([2, 4, 8, 20, 24, 64, 80, 128])
PASTS = st.one_of(st.integers(0, 300), st.integers(250, 900))  # a chunk of keys, and several
SEEDS = st.integers(0, 2**32 - 1)
BRANCHES = st.sampled_from([0, 1, 1, 3, 8])  # one is a chain, whose tokens see all before them


WINDOWS = st.sampled_from([0, 1, 3, 16, 17, 100, 300, 10_000])
CAPS = st.sampled_from([0.0, 50.0, 0.7])


@given(
    heads=HEADS,
    size=SIZES,
    rows=st.lists(st.tuples(st.integers(0, 9), PASTS), min_size=1, max_size=4).filter(
        lambda rows: any(new for new, _ in rows)
    ),
    spare=st.integers(0, 17),
    branches=BRANCHES,
    dtype=st.sampled_from(sorted(TYPES)),
    special=st.none() | st.tuples(WINDOWS, CAPS, st.booleans()),
    seed=SEEDS,
)
def test_it_gives_the_references_numbers_also_with_windows_caps_and_sinks(
    heads, size, rows, spare, branches, dtype, special, seed
) -> None:
    random = np.random.default_rng(seed)
    new, past = ([row[i] for row in rows] for i in (0, 1))
    inputs = typed(step(random, *heads, size, new, past, spare, branches), dtype)
    window, softcap, tolerance = 0, 0.0, TOLERANCE
    if special:
        window, softcap, sinks = special
        inputs, tolerance = capped_step(random, heads, sinks, 4.0, inputs), 8 * TOLERANCE  # of louder queries
    found = attend(inputs, *heads, window=window, softcap=softcap)
    wanted = expected(inputs, *heads, window, softcap)
    np.testing.assert_allclose(found[0], wanted[0], rtol=tolerance, atol=tolerance if special else 4 * TOLERANCE)
    for found_cache, wanted_cache in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(found_cache, wanted_cache)


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("size", [16, 20, 64])
@pytest.mark.parametrize("visible", [1, 255, 256, 257, 700])
def test_it_has_the_bits_of_the_rule(visible, size, dtype) -> None:
    """Nothing is hidden but by windows, which then have the chunks of a token that sees as much."""
    random = np.random.default_rng(visible)
    inputs = typed(step(random, 4, 2, size, [1], [visible - 1], 0), dtype)
    inputs["attn_bias"][:] = 0
    for sinks, window, softcap in ((False, 0, 0.0), (True, 0, 0.7), (True, 300, 0.0), (False, 256, 50.0)):
        given = capped_step(random, (4, 2), sinks, 4.0, inputs)
        out, *caches = attend(given, 4, 2, window=window, softcap=softcap)
        for head in (0, 3):
            wanted = expected_bits(given, caches, 0, head, head // 2, window, softcap)
            np.testing.assert_array_equal(out.reshape(4, size)[head].view(np.uint32), wanted.view(np.uint32))


def test_a_sink_far_above_takes_all_the_weight_and_one_far_below_none() -> None:
    inputs = step(np.random.default_rng(3), 4, 2, 16, [5], [40], 3)
    plain = attend(inputs, 4, 2)[0]
    with_sinks = attend(inputs | {"sinks": np.array([-200, -np.inf, 200, 0], np.float32)}, 4, 2)[0].reshape(5, 4, 16)
    np.testing.assert_array_equal(with_sinks[:, :2], plain.reshape(5, 4, 16)[:, :2])
    assert np.abs(with_sinks[:, 2]).max() < 1e-30
    assert np.abs(with_sinks[:, 3] - plain.reshape(5, 4, 16)[:, 3]).max() > 1e-3


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_without_queries_keys_and_values_are_appended_and_nothing_else(dtype: str) -> None:
    inputs = typed(step(np.random.default_rng(5), 4, 2, 24, [7, 0, 40], [30, 3, 100], 5), dtype)
    asked, found = attend(inputs, 4, 2), attend(inputs, 4, 2, asks=0)
    assert asked[0].any()
    assert not found[0].any()
    for found_cache, asked_cache in zip(found[1:], asked[1:], strict=True):
        np.testing.assert_array_equal(found_cache, asked_cache)


@given(
    heads=HEADS,
    size=SIZES,
    new=st.integers(1, 40),
    past=PASTS,
    gaps=st.integers(0, 60),
    branches=BRANCHES,
    dtype=st.sampled_from(sorted(TYPES)),
    threads=st.sampled_from([0, 1, 5]),
    window=WINDOWS,
    softcap=CAPS,
    sinks=st.booleans(),
    seed=SEEDS,
)
@example((1, 1), 64, 24, 700, 60, 1, "float32", 1, 0, 0.0, False, 0)
@example((1, 1), 20, 24, 700, 60, 3, "float16", 1, 0, 0.0, True, 1)
@example((1, 1), 64, 24, 700, 0, 1, "int8", 1, 300, 0.0, True, 1)
@example((4, 2), 16, 12, 700, 0, 8, "float16", 1, 0, 0.7, True, 2)
def test_a_token_has_the_bits_of_the_rule_alone_and_in_any_company(
    heads, size, new, past, gaps, branches, dtype, threads, window, softcap, sinks, seed
) -> None:
    """Chunks of tokens beside one another end at different keys. Then the keys that a token sees are moved after other
    tokens' keys, and it is computed alone: not a bit changes."""
    random = np.random.default_rng(seed)
    many = typed(step(random, *heads, size, [new], [past], random.integers(0, 20), branches), dtype)
    many = capped_step(random, heads, sinks, 4.0, many)
    others = {"window": window, "softcap": softcap}
    together, k_cache, v_cache = attend(many, *heads, threads=threads, **others)
    by_head = together.reshape(new, heads[0], size)
    for _ in range(4):
        token, head = int(random.integers(new)), int(random.integers(heads[0]))
        kv_head = head // (heads[0] // heads[1])
        wanted = expected_bits(many, [k_cache, v_cache], token, head, kv_head, window, softcap)
        np.testing.assert_array_equal(by_head[token, head].view(np.uint32), wanted.view(np.uint32))
    token = int(random.integers(new))
    seen = np.flatnonzero(many["attn_bias"][0, 0, token] == 0)[:-1]  # but itself, which is appended
    at = np.sort(random.choice(len(seen) + gaps, len(seen), replace=False))
    length = len(seen) + gaps
    one = {name: many[name][:, token : token + 1] for name in ("q", "k", "v")}
    one |= {name: many[name] for name in ("sinks",) if name in many}
    for name, plane in (("k_cache", k_cache), ("v_cache", v_cache)):
        garbage = random.normal(size=(1, heads[1], length + 5, size)).astype(np.float32)
        one[name] = to_slots(garbage * np.float32(1e4), dtype)
        one[name][:, :, at] = plane[:, :, seen]
    bias = np.full((1, 1, 1, length + 1), LOWEST, np.float32)
    bias[..., at] = bias[..., length] = 0
    alone = attend(one | {"attn_bias": bias, "past_length": np.array([length])}, *heads, **others)[0]
    np.testing.assert_array_equal(alone[0, 0].view(np.uint8), together[0, token].view(np.uint8))


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, 0.0, 1e-35, 3e38])
def test_slots_of_extreme_numbers_are_the_references(spoiled) -> None:
    inputs = typed(step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0), "int8")
    for name in ("k", "v"):
        inputs[name][0, 1, :4] = spoiled
        inputs[name][0, 2] *= np.float32(1e-34)
    for found, wanted in zip(attend(inputs, 4, 2)[1:], expected(inputs, 4, 2)[1:], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotated", [16, 12, 4, 0])
def test_it_norms_and_rotates_queries_and_keys(dtype, packed, rotated) -> None:
    heads, kv_heads, size, epsilon = 6, 2, 16, 1e-5
    random = np.random.default_rng(4)
    inputs = typed(step(random, heads, kv_heads, size, [7], [9], 2), dtype)
    del inputs["row_splits"]
    angles = random.normal(size=(40, rotated // 2)).astype(np.float32)
    positions = random.integers(0, 40, (1, 7))
    if rotated:
        inputs |= {"positions": positions, "cos": np.cos(angles), "sin": np.sin(angles)}
    inputs |= {
        "q_norm": random.normal(size=size).astype(np.float32),
        "k_norm": random.normal(size=size).astype(np.float32),
    }

    def ready(x: NDArray[Any], norm: NDArray[Any]) -> NDArray[Any]:
        by_head = x.astype(np.float64).reshape(1, 7, -1, size)
        normed = by_head / np.sqrt((by_head**2).mean(-1, keepdims=True) + epsilon) * norm.astype(np.float64)
        low, high, rest = np.split(normed, [rotated // 2, rotated], axis=-1)
        cos, sin = (f(angles.astype(np.float64))[positions[0], None] for f in (np.cos, np.sin))
        return np.concatenate((low * cos - high * sin, high * cos + low * sin, rest), axis=-1).reshape(x.shape)

    q, k = ready(inputs["q"], inputs["q_norm"]), ready(inputs["k"], inputs["k_norm"])
    plain = inputs | {"q": q, "k": k.astype(np.float32), "row_splits": np.array([0, 7])}
    wanted = expected(plain, heads, kv_heads)
    if packed:
        inputs["q"] = np.concatenate([inputs.pop("q"), inputs.pop("k"), inputs.pop("v")], axis=-1)
    found = attend(inputs, heads, kv_heads, epsilon=epsilon)
    # A key that is rotated in float32 may round to the cache's next number.
    steps = {"float32": TOLERANCE, "float16": 2**-10, "int8": 1 / 127}[dtype]
    np.testing.assert_allclose(found[0], wanted[0], rtol=4 * steps, atol=8 * steps)
    largest = np.abs(from_slots(wanted[1])).max(axis=-1, keepdims=True)
    assert (np.abs(from_slots(found[1]) - from_slots(wanted[1])) <= 1.1 * steps * largest).all()
    np.testing.assert_array_equal(found[2], wanted[2])


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    inputs = step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0)
    inputs["attn_bias"][0, 0, 1] = LOWEST
    out = attend(inputs, 4, 2)[0]
    assert not out[0, 1].any()
    assert out[0, 0].any()


ROTATION = {"positions": np.zeros((1, 3), np.int64)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"past_length": np.array([60])}, "exceed the KV cache"),
        ({"past_length": np.array([-1])}, "exceed the KV cache"),
        ({"past_length": np.array([2**63 - 2])}, "exceed the KV cache"),
        ({"row_splits": np.array([0, 9])}, "row_splits"),
        ({"row_splits": np.array([2, 1])}, "row_splits"),
        ({"row_splits": np.array([0, 2])}, "do not cover"),
        ({"attn_bias": np.zeros((1, 1, 2, 10), np.float32)}, "places"),
        ({"attn_bias": np.zeros((1, 1, 3, 99), np.float32)}, "wider than the KV cache"),
        ({"attn_bias": np.zeros((2, 1, 3, 10), np.float32)}, "rows"),
        ({"q": np.zeros((1, 3, 40), np.float32)}, "width"),
        (ROTATION, "rotations"),
        (ROTATION | dict.fromkeys(("cos", "sin"), np.ones((4, 5), np.float32)), "more than a head"),
        (
            {"positions": np.array([[4, 5, 6]])} | dict.fromkeys(("cos", "sin"), np.ones((6, 4), np.float32)),
            "no rotation",
        ),
        ({"k": np.zeros((1, 2, 16), np.float32)}, "extent 2 in place of 3"),
        (dict.fromkeys(CACHES, np.zeros((1, 2, 9, 4), np.int8)), "no room for a number"),
    ],
)
def test_inputs_that_contradict_each_other_are_refused(change, words) -> None:
    inputs = step(np.random.default_rng(0), 4, 2, 8, [3], [5], 0) | change
    with pytest.raises(Exception, match=words):
        attend(inputs, 4, 2)


@pytest.mark.parametrize("name", ["k", "v", "v_cache", "past_length", "sinks"])
def test_inputs_that_shrink_after_a_good_run_are_refused(name: str) -> None:
    """The node looks at extents again where one may have changed."""
    inputs = step(np.random.default_rng(0), 8, 2, 16, [2], [5], 0) | {"sinks": np.zeros(8, np.float32)}
    attend(inputs, 8, 2)
    shorter = inputs[name][:0] if inputs[name].ndim == 1 else inputs[name][:, :1].copy()
    with pytest.raises(Exception, match="has extent"):
        attend(inputs | {name: shorter}, 8, 2)
    attend(inputs, 8, 2)
