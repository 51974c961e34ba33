"""Draws: the kernel is the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins import native
from plugins.reference import draws, uniform
from plugins.schema import Purpose


@settings(max_examples=100, deadline=None)
@given(data=st.data(), depths=st.integers(1, 9), purpose=st.sampled_from(Purpose))
def test_the_kernel_is_the_reference(data, slots, depths, purpose) -> None:
    settings_ = data.draw(slots(data.draw(st.integers(1, 4))))
    branches = len(settings_.seed)
    tips = np.array(data.draw(st.lists(st.integers(0, 2**31), min_size=branches, max_size=branches)))
    found = np.full((branches, depths), -1.0)
    tensors = {"tip_position": tips, "seed": settings_.seed, "stream": settings_.stream, "draws": found}
    native.create("Draws", tensors, {"purpose": int(purpose)})()
    np.testing.assert_array_equal(found, draws(tips, settings_.seed, settings_.stream, depths, purpose))
    assert ((found >= 0) & (found < 1)).all()


def test_it_is_the_draw_of_the_token_at_the_position() -> None:
    found = draws(np.array([6]), np.array([9], np.uint64), np.array([2]), 3)
    for depth in range(3):
        assert found[0, depth] == uniform(9, 2, 7 + depth, Purpose.TARGET) / 2**53


def test_an_unknown_purpose_is_refused() -> None:
    one = np.zeros(1, np.int64)
    tensors = {"tip_position": one, "seed": one.astype(np.uint64), "stream": one, "draws": np.zeros((1, 2))}
    with pytest.raises(ValueError, match="purpose"):
        native.create("Draws", tensors, {"purpose": 3})


@settings(max_examples=100, deadline=None)
@given(data=st.data(), depths=st.integers(1, 9))
def test_a_coupled_drafter_sees_the_targets_draws_and_settings_in_float32(data, slots, depths) -> None:
    settings_ = data.draw(slots(data.draw(st.integers(1, 4))))
    branches = len(settings_.seed)
    tips = np.array(data.draw(st.lists(st.integers(0, 2**31), min_size=branches, max_size=branches)))
    found = {
        "draws": np.full((branches, depths), -1.0, np.float32),
        "draft_temperature": np.full(branches, -1.0, np.float32),
        "draft_top_p": np.full(branches, -1.0, np.float32),
    }
    given_ = {name: getattr(settings_, name) for name in ("seed", "stream", "temperature", "top_p")}
    native.create("CoupledDraws", {"tip_position": tips, **given_, **found})()
    expected = draws(tips, settings_.seed, settings_.stream, depths).astype(np.float32)
    np.testing.assert_array_equal(found["draws"], expected)
    np.testing.assert_array_equal(found["draft_temperature"], settings_.temperature.astype(np.float32))
    np.testing.assert_array_equal(found["draft_top_p"], settings_.top_p.astype(np.float32))
