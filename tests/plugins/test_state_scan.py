"""StateScan: the kernel has the rule's bits, and a token those of plain decoding, in any chunk, tree and company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plugins.ops.state_scan import COLUMNS, Scan, state_scan, untiled
from outrider.plugins.reference.lanes import lanes_softplus
from tests.plugins.onnx_node import FLOAT, INT, kernel_session
from tests.texts_in_passes import passes

BRANCHES, LOG = 2, 6
_OUTPUTS = (("out", FLOAT, 3), ("state_out", FLOAT, 5), ("log_out", FLOAT, 3))
SHAPES = {  # key heads, heads, keys, values
    "small": (2, 4, 16, 16),
    "odd": (1, 3, 5, 37),
    "qwen": (2, 4, 128, 128),
}


def kernel(scan: Scan, threads: int = 2) -> Any:
    """The op in a session, called as the rule is."""
    names = [
        ("x", FLOAT, 3), ("a", FLOAT, 3), ("decay_log", FLOAT, 1), ("step_bias", FLOAT, 1), ("state", FLOAT, 5),
        ("log", FLOAT, 3), ("parent", INT, 1), ("branch", INT, 1), ("replay", INT, 2), ("replays", INT, 1),
        ("fold", INT, 1), ("b" if scan.delta else "", FLOAT, 3), ("skip" if scan.skip is not None else "", FLOAT, 1),
    ]  # fmt: skip
    attributes = {"key_heads": scan.key_heads, "values": scan.values, "delta": int(scan.delta), "scale": scan.scale}
    steps = {"least_step": scan.least_step, "most_step": scan.most_step}
    session = kernel_session("StateScan", tuple(names), _OUTPUTS, threads, **attributes, **steps)

    def run(inputs: Any, state: Any, path: Any, kept: Any) -> list[NDArray[Any]]:
        x, a, b = inputs
        values = [x[None], a[None], scan.decay_log, scan.step_bias, *state, *path, *kept]
        values += [None if b is None else b[None], scan.skip]
        out, *after = session.run(None, {name: v for (name, *_), v in zip(names, values, strict=True) if name})
        return [out[0], *after]

    return run


def a_scan(rng: np.random.Generator, shape: str, delta: bool) -> tuple[Scan, int, int]:
    """Return a scan, how many numbers a token has of x, and its heads."""
    key_heads, heads, keys, values = SHAPES[shape]
    numbers = [rng.standard_normal(heads, np.float32) for _ in range(3)]
    skip = None if delta else numbers[2]
    scale = 2.0 if rng.random() < 0.5 else 1.0
    scan = Scan(numbers[0], numbers[1], key_heads, values, delta, scale, 0.0 if delta else 0.01, skip=skip)
    return scan, 2 * key_heads * keys + heads * values, heads


def nothing(shape: str, branches: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    key_heads, heads, keys, values = SHAPES[shape]
    state = np.zeros((branches, heads, -(-values // COLUMNS), keys, COLUMNS), np.float32)
    return state, np.zeros((branches, LOG, key_heads * keys + heads * values + 2 * heads), np.float32)


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("shape", ["small", "odd", pytest.param("qwen", marks=pytest.mark.long)])
@given(seed=st.integers(0, 2**32 - 1))
def test_a_token_has_the_same_bits_in_any_step(seed: int, shape: str, delta: bool) -> None:
    rng = np.random.default_rng(seed)
    scan, size, heads = a_scan(rng, shape, delta)
    texts = [rng.standard_normal((int(rng.integers(1, 25)), size + 2 * heads), np.float32) for _ in range(BRANCHES)]

    def inputs(rows: NDArray[np.float32]) -> Any:
        x, a, b = np.split(rows, [size, size + heads], 1)
        return np.ascontiguousarray(x), np.ascontiguousarray(a), np.ascontiguousarray(b) if delta else None

    plain = []
    for text in texts:
        path = np.arange(len(text)) - 1, np.zeros(len(text), np.int64)
        kept = np.zeros((1, LOG), np.int64), np.zeros(1, np.int64), np.full(1, len(text))
        plain.append(state_scan(scan, inputs(text), nothing(shape, 1), path, kept)[0])
    run, state = kernel(scan), nothing(shape, BRANCHES)
    for step in passes(rng, texts, LOG):
        found = run(inputs(step.rows), state, step.path, step.kept)
        wanted = state_scan(scan, inputs(step.rows), state, step.path, step.kept)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        for token, (number, place) in step.true.items():
            np.testing.assert_array_equal(found[0][token], plain[number][place])
        state = found[1], found[2]


def test_it_is_the_recurrence_of_the_papers() -> None:
    """In float64: one token after another, as the formulas stand."""
    rng = np.random.default_rng(3)
    for delta in (True, False):
        scan, size, heads = a_scan(rng, "small", delta)
        x, a, b = (rng.standard_normal((30, n), np.float32) for n in (size, heads, heads))
        path, kept = (np.arange(30) - 1, np.zeros(30, np.int64)), (np.zeros((1, LOG), np.int64), np.zeros(1, np.int64))
        fold = np.full(1, 30)
        out, state, _ = state_scan(scan, (x, a, b if delta else None), nothing("small", 1), path, (*kept, fold))
        whole = np.zeros((heads, 16, 16))
        for t in range(30):
            q, k, v = np.split(x[t].astype(np.float64), [32, 64])
            q, k, v = (
                (np.repeat(each.reshape(2, 16), 2, 0) for each in (q, k))
                if False
                else (np.repeat(q.reshape(2, 16), 2, 0), np.repeat(k.reshape(2, 16), 2, 0), v.reshape(4, 16))
            )
            step = np.clip(np.log1p(np.exp(a[t].astype(np.float64) + scan.step_bias)), scan.least_step, None)
            g = np.exp(-np.exp(scan.decay_log.astype(np.float64)) * step)
            if delta:
                q, k = (each / np.sqrt((each**2).sum(1, keepdims=True) + 1e-6) for each in (q, k))
                beta = scan.scale / (1 + np.exp(-b[t].astype(np.float64)))
                d = beta[:, None] * (v - g[:, None] * np.einsum("hk,hkv->hv", k, whole))
                q = q / 4
            else:
                d = step[:, None] * v
            whole = g[:, None, None] * whole + k[:, :, None] * d[:, None]
            wanted = np.einsum("hk,hkv->hv", q, whole)
            if scan.skip is not None:
                wanted += scan.skip[:, None] * v
            np.testing.assert_allclose(out[t].reshape(4, 16), wanted, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(untiled(state[0], 16), whole, atol=1e-4, rtol=1e-4)


def test_softplus_is_within_a_few_units_of_the_last_place() -> None:
    x = np.linspace(-90, 90, 100001, dtype=np.float32)
    exact = np.logaddexp(0, x.astype(np.float64))
    kept = exact > 1e-37
    assert np.abs(lanes_softplus(x)[kept] / exact[kept] - 1).max() < 5e-7
