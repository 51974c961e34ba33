"""RaceNoise: the kernel is the reference, and its noise is that of the races which the target runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.sampling import SETTINGS, Sampling
from outrider.plugins import native
from outrider.plugins.reference import race_noise
from outrider.plugins.schema import Purpose
from tests.plugins.test_sample import one_slot, sample_rows

POISON = -1.0


def noise_outputs(branches: int, depths: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Poisoned."""
    shapes = {"noise": (branches, depths, vocabulary), "draft_sampling": (branches, SETTINGS)}
    return {name: np.full(shape, POISON, np.float32) for name, shape in shapes.items()}


def noise_inputs(tips, slots) -> dict[str, np.ndarray]:
    return {"tip_position": tips, **vars(slots)}


@given(
    data=st.data(),
    depths=st.integers(1, 9),
    vocabulary=st.sampled_from([1, 3, 4, 63, 64, 65, 200]),
    purpose=st.sampled_from(Purpose),
)
def test_the_kernel_is_the_reference(data, slots, depths, vocabulary, purpose) -> None:
    settings_ = data.draw(slots(data.draw(st.integers(1, 4))))
    branches = len(settings_.seed)
    tips = np.array(data.draw(st.lists(st.integers(0, 2**31), min_size=branches, max_size=branches)))
    found = noise_outputs(branches, depths, vocabulary)
    native.create("RaceNoise", noise_inputs(tips, settings_) | found, {"purpose": int(purpose)})()
    expected = race_noise(tips, settings_.seed, settings_.stream, depths, vocabulary, purpose)
    sampled = np.array([Sampling(*row).temperature > 0 for row in settings_.sampling])
    np.testing.assert_array_equal(found["noise"][sampled], expected[sampled])
    assert (found["noise"][~sampled] == POISON).all()
    np.testing.assert_array_equal(found["draft_sampling"], settings_.sampling.astype(np.float32))


def test_the_target_runs_this_race_for_the_token_behind_the_tip() -> None:
    logits = np.random.default_rng(5).normal(size=(30, 300)).astype(np.float32) * 2
    slots = one_slot(temperature=0.8, seed=9, stream=2)
    chosen = sample_rows(logits, slots, positions=np.arange(30) + 50)
    found = noise_outputs(1, 30, 300)
    native.create("RaceNoise", noise_inputs(np.array([50]), slots) | found, {})()
    raced = logits.astype(np.float64) / 0.8 - np.log(found["noise"][0].astype(np.float64))
    np.testing.assert_array_equal(chosen, raced.argmax(1))


def test_an_unknown_purpose_is_refused() -> None:
    tensors = noise_inputs(np.zeros(1, np.int64), one_slot()) | noise_outputs(1, 2, 8)
    with pytest.raises(ValueError, match="purpose"):
        native.create("RaceNoise", tensors, {"purpose": 3})
