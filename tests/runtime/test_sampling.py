"""Sampling settings are checked by name; logprobs agree with torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plans.errors import PlanError, RequestError
from runtime.sampling import SamplingParams, likeliest, logprobs


def test_the_default_is_greedy() -> None:
    assert SamplingParams().temperature == 0.0


def test_limits_are_inclusive_and_numpy_numbers_become_python_ones() -> None:
    params = SamplingParams(
        temperature=np.float32(100),  # type: ignore[arg-type]
        top_k=np.int64(2**63 - 1),  # type: ignore[arg-type]
        top_p=1,
        seed=2**64 - 1,
        stream=2**63 - 1,
        filter_order="temperature_last",
    )
    assert [type(value) for value in (params.temperature, params.top_k, params.top_p)] == [float, int, float]


@pytest.mark.parametrize(
    ("name", "values", "limits"),
    [
        ("temperature", [-0.1, 100.1, float("nan"), float("inf"), True, "1", None], "from 0 .* to 100"),
        ("top_k", [-1, 1.0, True, None, 2**63], f"from 0 to {2**63 - 1}"),
        ("top_p", [0.0, 1.1, -1, float("nan"), False, "1"], "above 0 and at most 1"),
        ("seed", [-1, 2**64, True, 1.0], f"from 0 to {2**64 - 1}"),
        ("stream", [-1, 2**63, False], f"from 0 to {2**63 - 1}"),
        ("filter_order", ["first", None], "'temperature_first' or 'temperature_last'"),
    ],
)
def test_what_is_out_of_limits_is_refused_with_name_value_and_limits(
    name: str, values: list[object], limits: str
) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name} is .*; pass .*{limits}") as caught:
            SamplingParams(**{name: value})  # type: ignore[arg-type]
        assert str(value) in str(caught.value)


ROWS = st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=40)


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


@given(st.lists(st.sampled_from([-np.inf, -2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=40), st.data())
def test_the_likeliest_are_those_of_a_sort(values: list[float], data: st.DataObject) -> None:
    row, count = np.array(values, np.float32), data.draw(st.integers(0, len(values)))
    assert likeliest(row, count).tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]


def test_ties_give_the_lower_id_at_the_cut_too() -> None:
    assert [i for i, _ in logprobs(np.array([1, 3, 1, 3, 1], np.float32), 0, 3).top] == [1, 3, 0]


def test_masked_tokens_have_no_probability() -> None:
    result = logprobs(np.array([0, -np.inf, 0], np.float32), 1, 3)
    assert result.logprob == -np.inf
    assert result.top == ((0, pytest.approx(-np.log(2))), (2, pytest.approx(-np.log(2))), (1, -np.inf))


def test_extreme_logits_keep_their_digits() -> None:
    row = np.array([3e38, -3e38, 3e38], np.float32)
    assert logprobs(row, 0).logprob == pytest.approx(-np.log(2))


@pytest.mark.parametrize(("token", "top"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_ids_outside_the_row_are_refused(token: int, top: int) -> None:
    with pytest.raises(RequestError):
        logprobs(np.zeros(3, np.float32), token, top)


@pytest.mark.parametrize("bad", [[np.nan, 0], [np.inf, 0], [-np.inf, -np.inf]])
def test_logits_that_are_no_distribution_are_a_plan_error(bad: list[float]) -> None:
    with pytest.raises(PlanError, match="outrider verify"):
        logprobs(np.array(bad, np.float32), 0)
