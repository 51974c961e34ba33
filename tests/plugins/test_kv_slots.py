"""Slots of a KV cache: how far numbers are rounded, and that a slot depends on its own numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from outrider.plans.buffers import DType
from outrider.plans.kv_slots import SCALE_BYTES, slot_size
from outrider.plugins.reference import from_slots, to_slots
from tests.properties import cheap

NUMBERS = arrays.arrays(np.float32, (5, 24), elements=st.floats(-(2.0**60), 2.0**60, width=32))


@cheap
@given(numbers=NUMBERS)
def test_int8_rounds_each_number_by_half_a_step_at_most(numbers) -> None:
    found = from_slots(to_slots(numbers, np.int8))
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    step = largest.astype(np.float64) / 127
    error = np.abs(found.astype(np.float64) - numbers)
    assert (error <= np.maximum(0.5001 * step, 2.0**-100)).all()
    assert ((np.abs(found).max(axis=-1) >= 0.999999 * largest[:, 0]) | (largest[:, 0] < 2.0**-100)).all()


def test_a_slot_of_int8_ends_with_its_scale() -> None:
    slot = to_slots(np.array([254.0, -127.0, 1.0, 3.0, 5.0], np.float32), np.int8)
    assert slot[:5].tolist() == [127, -64, 0, 2, 2]  # in steps of 2: -63.5, 0.5, 1.5 and 2.5 go to the even neighbour
    assert slot[5:].view(np.float32) == 2
    assert len(slot) == slot_size(DType.INT8, 5) == 5 + SCALE_BYTES


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_its_slot_no_number(spoiled) -> None:
    found = from_slots(to_slots(np.array([[1, spoiled], [1, 2]], np.float32), np.int8))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
