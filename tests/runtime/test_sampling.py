"""Log-probabilities agree with torch."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.errors import PlanError, RequestError
from outrider.runtime.sampling import likeliest, logprobs
from tests.properties import cheap

ROWS = st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40)


@cheap
@given(row=ROWS, data=st.data())
def test_logprobs_are_the_log_softmax(row: list[float], data: st.DataObject) -> None:
    token, top = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row)))
    expected = torch.log_softmax(torch.tensor(row, dtype=torch.float64), 0).tolist()
    result = logprobs(np.array(row, np.float32), token, top)
    assert result.token_id == token
    assert result.logprob == pytest.approx(expected[token], abs=1e-9)
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    assert [i for i, _ in result.top] == ids
    assert [value for _, value in result.top] == pytest.approx([expected[i] for i in ids], abs=1e-9)


@cheap
@given(st.lists(st.sampled_from([-np.inf, -2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40), st.data())
def test_the_likeliest_are_those_of_a_sort(values: list[float], data: st.DataObject) -> None:
    row, count = np.array(values, np.float32), data.draw(st.integers(0, len(values)))
    assert likeliest(row, count).tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


def test_masked_tokens_have_no_probability() -> None:
    result = logprobs(np.array([0, -np.inf, 0], np.float32), 1, 3)
    assert result.logprob == -np.inf
    assert result.top == ((0, pytest.approx(-np.log(2))), (2, pytest.approx(-np.log(2))), (1, -np.inf))
    assert logprobs(np.array([3e38, -3e38, 3e38], np.float32), 0).logprob == pytest.approx(-np.log(2))


@pytest.mark.parametrize(("token", "top"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_ids_outside_the_row_are_refused(token: int, top: int) -> None:
    with pytest.raises(RequestError):
        logprobs(np.zeros(3, np.float32), token, top)


@pytest.mark.parametrize("bad", [[np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
def test_logits_that_are_no_distribution_are_a_plan_error(bad: list[float]) -> None:
    with pytest.raises(PlanError, match="outrider verify"):
        logprobs(np.array(bad, np.float32), 0)


_BITS = """
import numpy as np
from outrider.runtime.sampling import logprobs
rows = np.random.default_rng(0).normal(0, 6, (40, 1003)).astype(np.float32)
rows[::3, ::7] = -np.inf
print(b"".join(np.float64(logprobs(row, 1).logprob).tobytes() for row in rows).hex())
"""


def test_logprobs_have_the_same_bits_with_and_without_vector_kernels() -> None:
    """NumPy's exp has other kernels where vectors are disabled; ours must not differ."""
    kernels = np._core._multiarray_umath  # type: ignore[attr-defined]
    off = " ".join(name for name in kernels.__cpu_dispatch__ if kernels.__cpu_features__[name])
    found = [
        subprocess.run(
            [sys.executable, "-c", _BITS], env=os.environ | extra, capture_output=True, text=True, check=True
        ).stdout
        for extra in ({}, {"NPY_DISABLE_CPU_FEATURES": off})
    ]
    assert found[0] == found[1]
