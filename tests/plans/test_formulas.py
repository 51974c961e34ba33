"""Formulas of sizes: what they are worth, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.compiler.kernels.sizes import largest, product, quotient, size
from outrider.plans.formulas import formula


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("N", 5), ("(N * 4 + 255) // 256", 1), ("min(N, 3) + max(T, 2) % 4", 6), ("-N + 6", 1), ("N - T", -6)],
)
def test_values(text: str, value: int) -> None:
    assert formula(text).value({"N": 5, "T": 11}) == value
    assert formula(text).names == {"N", "T"} & set(text)


@pytest.mark.parametrize(
    "text",
    ["", "N ** 2", "N / 2", "1.5", "True", "N.bit_length()", "abs(N)", "min(N)", "min(N, key=T)", "'N'", "N" * 600],
)
def test_nothing_else_is_a_formula(text: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        formula(text)


SIZES = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["N", "R", "B"])).map(size),
    lambda inner: st.tuples(inner, inner, st.sampled_from("+-*")).map(
        lambda each: {"+": each[0] + each[1], "-": each[0] - each[1], "*": each[0] * each[1]}[each[2]]
    ),
    max_leaves=6,
)


@given(SIZES, SIZES, st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_sizes_are_written_as_formulas_of_the_same_value(a, b, n, r, branches) -> None:
    at = {"N": n, "R": r, "B": branches}
    x, y = formula(str(a)).value(at), formula(str(b)).value(at)
    assert (formula(str(a + b)).value(at), formula(str(a * b)).value(at)) == (x + y, x * y)
    assert x <= largest(a, at)
    assert (a + b) - b == a
    if a * b != size(0) and len(b.terms) == 1:
        assert (a * b).divided(b) == a


def test_edges_of_rows_are_one_more_than_rows() -> None:
    assert size("E") - 1 == size("R")
    assert product([size("R"), size(3)]) == size("R") * 3
    assert formula(quotient(size("N") * 2, 256)).value({"N": 200}) == 2
    assert size("N").divided(size("R")) is None
