"""Rows of several lengths in one rectangle: a prompt beside branches that decode, and any."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.kv.alignment import AlignmentState


def test_a_prompt_of_two_hundred_beside_two_that_decode() -> None:
    state = AlignmentState(3)
    for row in (0, 1):
        state.open(row, 150)
    assert state.open(2, 50) == 100  # the new branch has the prefix, and padding up to the others' length
    assert state.cache_length == 150
    alignment = state.align([2, 2, 200])
    assert alignment.width == 200
    assert alignment.padding_lengths.tolist() == [198, 198, 0]
    positions = alignment.positions([150, 150, 50])
    assert positions[0, -2:].tolist() == positions[1, -2:].tolist() == [150, 151]
    assert positions[2].tolist() == list(range(50, 250))
    state.commit(alignment)
    assert state.cache_length == 350
    assert state.valid_lengths.tolist() == [152, 152, 250]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_every_token_is_where_its_row_says(lengths: list[int], data: st.DataObject) -> None:
    first = data.draw(st.lists(st.integers(0, 50), min_size=len(lengths), max_size=len(lengths)))
    alignment = AlignmentState(len(lengths)).align(lengths)
    assert alignment.width == max(lengths)
    np.testing.assert_array_equal(alignment.padding_mask.sum(axis=1), lengths)
    for row, (length, start) in enumerate(zip(lengths, first, strict=True)):
        row_positions = alignment.positions(first)[row]
        assert row_positions[alignment.width - length :].tolist() == list(range(start, start + length))
