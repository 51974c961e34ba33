"""PathConv: the kernel has the rule's bits, and a token those of plain decoding, in any chunk, tree and company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.plugins.ops.path_conv import path_conv
from tests.plugins.onnx_node import FLOAT, INT, kernel_session
from tests.texts_in_passes import Pass, passes

BRANCHES, LOG = 3, 8
_INPUTS = (
    ("x", FLOAT, 3), ("weight", FLOAT, 2), ("tail", FLOAT, 3), ("log", FLOAT, 3), ("parent", INT, 1),
    ("branch", INT, 1), ("replay", INT, 2), ("replays", INT, 1), ("fold", INT, 1),
)  # fmt: skip
_OUTPUTS = (("out", FLOAT, 3), ("tail_out", FLOAT, 3), ("log_out", FLOAT, 3))


def kernel(weight: NDArray[Any], bias: NDArray[Any] | None, silu: bool, threads: int = 2) -> Any:
    """The op in a session, called as the rule is."""
    inputs = _INPUTS if bias is None else (*_INPUTS, ("bias", FLOAT, 1))
    session = kernel_session("PathConv", inputs, _OUTPUTS, threads, silu=int(silu))

    def run(x: Any, state: Any, path: Any, kept: Any) -> list[NDArray[Any]]:
        given = [x[None], weight, *state, *path, *kept, *(() if bias is None else (bias,))]
        out, *after = session.run(None, {name: value for (name, *_), value in zip(inputs, given, strict=True)})
        return [out[0], *after]

    return run


@given(seed=st.integers(0, 2**32 - 1), channels=st.sampled_from((5, 32, 1000)), taps=st.sampled_from((2, 3, 4)))
def test_a_token_has_the_same_bits_in_any_step(seed: int, channels: int, taps: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((taps, channels), np.float32)
    bias, silu = (rng.standard_normal(channels, np.float32) if rng.random() < 0.5 else None), bool(rng.random() < 0.5)
    texts = [rng.standard_normal((int(rng.integers(1, 40)), channels), np.float32) for _ in range(BRANCHES)]
    plain = [_one_by_one(text, weight, bias, silu) for text in texts]
    run, state = kernel(weight, bias, silu), _zeros(taps, channels)
    for step in passes(rng, texts, LOG):
        wanted = path_conv(step.rows, weight, state, step.path, step.kept, bias, silu=silu)
        found = run(step.rows, state, step.path, step.kept)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        for token, (number, place) in step.true.items():
            np.testing.assert_array_equal(found[0][token], plain[number][place])
        state = found[1], found[2]


def _zeros(taps: int, channels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return np.zeros((BRANCHES, taps - 1, channels), np.float32), np.zeros((BRANCHES, LOG, channels), np.float32)


def _one_by_one(text: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any] | None, silu: bool) -> NDArray[Any]:
    """Return the outputs of a whole text: a chain of nothing but committed tokens."""
    count = len(text)
    path = np.arange(count) - 1, np.zeros(count, np.int64)
    kept = np.zeros((1, LOG), np.int64), np.zeros(1, np.int64), np.full(1, count)
    state = tuple(each[:1] for each in _zeros(len(weight), text.shape[1]))
    return path_conv(text, weight, (state[0], state[1]), path, kept, bias, silu=silu)[0]


def test_a_forgotten_record_is_seen() -> None:
    """The property above can fail: without one of the replayed records, outputs differ."""
    rng = np.random.default_rng(0)
    weight, text = rng.standard_normal((3, 8), np.float32), rng.standard_normal((4, 8), np.float32)
    plain = _one_by_one(text, weight, None, False)
    step = Pass(text[3:], np.array([-1]), np.array([0]), np.array([[0, 1, *[0] * 6]]), np.array([1]), np.array([0]), {})
    tail, log = np.zeros((1, 2, 8), np.float32), np.zeros((1, LOG, 8), np.float32)
    tail[0, 1:], log[0, :2] = text[:1], text[1:3]
    out, *_ = path_conv(step.rows, weight, (tail, log), step.path, step.kept)
    assert not np.array_equal(out[0], plain[3])
    step.replays[:] = 2
    out, *_ = path_conv(step.rows, weight, (tail, log), step.path, step.kept)
    np.testing.assert_array_equal(out[0], plain[3])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parent": [-1, 1]}, "a parent does not come before its token"),
        ({"fold": [3]}, "more than are folded and logged"),
        ({"replays": [9]}, "more records are replayed than there are"),
        ({"replay": [[8] + [0] * 7], "replays": [1]}, "a record is replayed that is not there"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    values: dict[str, Any] = {"parent": [-1, 0], "branch": [0, 0], "replay": [[0] * 8], "replays": [0], "fold": [1]}
    values = {name: np.array(value) for name, value in (values | changed).items()}
    path, kept = (values["parent"], values["branch"]), (values["replay"], values["replays"], values["fold"])
    state = tuple(each[:1] for each in _zeros(3, 8))
    with pytest.raises(Exception, match=said):
        kernel(np.ones((3, 8), np.float32), None, False)(np.ones((2, 8), np.float32), state, path, kept)
