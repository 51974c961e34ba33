"""Exponential races: uniform numbers of Philox4x32-10, noise with the same bits everywhere, and winners as often as
their weights say; RaceNoise gives a drafter the noise of the races that the target runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.sampling import SETTINGS, Sampling
from outrider.plugins import native
from outrider.plugins.ops.race_noise import race_noise
from outrider.plugins.reference import RaceKey, exponential, fixed_weights, noise_words, philox4x32, race, uniform
from outrider.plugins.schema import Purpose
from tests.plugins.test_sample import one_slot, sample_rows

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_reference_gives_the_known_answers_of_random123(counter, key, words):
    assert philox4x32(counter, key) == words


@given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**40),
    purpose=st.sampled_from(Purpose),
)
def test_kernel_equals_reference(seed, stream, position, purpose):
    assert native.uniform(seed, stream, position, purpose) == uniform(seed, stream, position, purpose)


def test_every_part_of_the_counter_changes_the_number():
    base = native.uniform(1, 2, 3, 0)
    changed = [(1 + 2**32, 2, 3, 0), (2, 2, 3, 0), (1, 3, 3, 0), (1, 2 + 2**32, 3, 0), (1, 2, 4, 0), (1, 2, 3, 1)]
    assert len({base, *(native.uniform(*arguments) for arguments in changed)}) == 1 + len(changed)


WORDS = np.unique(
    np.concatenate(
        [
            np.arange(3000, dtype=np.uint32),
            ~np.arange(3000, dtype=np.uint32),
            np.uint32(2**31) + np.arange(-3000, 3000).astype(np.uint32),
            (np.arange(20000, dtype=np.uint64) * 2654435761 % 2**32).astype(np.uint32),
        ]
    )
)

SEEDS, STREAMS, POSITIONS = st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)


def test_noise_is_a_logarithm_with_all_its_digits():
    u = (WORDS.astype(np.float64) + 0.5) / 2**32
    exact = np.where(WORDS < 2**31, -np.log(u), -np.log1p(-((~WORDS).astype(np.float64) + 0.5) / 2**32))
    assert np.abs(exponential(WORDS) / exact - 1).max() < 4e-7
    assert exponential(np.array([0, 2**32 - 1], np.uint32)) == pytest.approx([33 * np.log(2), 2.0**-33])


def test_kernel_noise_equals_reference_bit_for_bit():
    found = np.array([native.exponential(int(word)) for word in WORDS], np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), exponential(WORDS).view(np.uint32))


@given(seed=SEEDS, stream=STREAMS, position=POSITIONS, purpose=st.integers(0, 2), token=st.integers(0, 2**22 - 1))
def test_every_id_has_the_noise_of_the_reference(seed, stream, position, purpose, token):
    (expected,) = exponential(noise_words(np.array([token]), RaceKey(seed, stream, position, purpose)))
    assert native.noise(seed, stream, position, purpose, token) == expected


@given(seed=SEEDS, stream=STREAMS, position=POSITIONS, size=st.sampled_from([1, 3, 64, 65, 1000]), data=st.data())
def test_the_winner_is_that_of_the_reference(seed, stream, position, size, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    weights = fixed_weights(rng.normal(0, data.draw(st.sampled_from([0.0, 1.0, 6.0])), size).astype(np.float32), 1.0)
    weights[rng.random(size) < data.draw(st.sampled_from([0.0, 0.9]))] = 0
    weights[rng.integers(size)] = 2**40
    assert native.race(weights, seed, stream, position, 0) == race(weights, RaceKey(seed, stream, position, 0))


def test_an_id_wins_as_often_as_its_weight_says():
    """Chi-square over 50,000 seeds; its 1e-9 quantile at 7 degrees of freedom is 56."""
    weights = fixed_weights(np.log(np.array([40, 25, 15, 10, 6, 3, 0.9, 0.1], np.float32)), 1.0)
    share = weights / weights.sum()
    runs = 50_000
    wins = np.bincount([native.race(weights, seed, 0, 17, 0) for seed in range(runs)], minlength=len(weights))
    assert ((wins - runs * share) ** 2 / (runs * share)).sum() < 56


def test_weights_that_nobody_has_are_refused():
    with pytest.raises(ValueError, match="no weight is more than 0"):
        native.race(np.zeros(3, np.uint64), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="more than 2\\^50"):
        native.race(np.array([2**50 + 1], np.uint64), 0, 0, 0, 0)


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


def test_the_target_runs_this_race_for_the_token_after_the_tip() -> None:
    logits = np.random.default_rng(5).normal(size=(30, 300)).astype(np.float32) * 2
    slots = one_slot(temperature=0.8, seed=9, stream=2)
    chosen = sample_rows(logits, slots, positions=np.arange(30) + 50)
    found = noise_outputs(1, 30, 300)
    native.create("RaceNoise", noise_inputs(np.array([50]), slots) | found, {})()
    raced = logits.astype(np.float64) / 0.8 - np.log(found["noise"][0].astype(np.float64))
    np.testing.assert_array_equal(chosen, raced.argmax(1))
