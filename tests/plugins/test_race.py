"""Exponential races: noise with the same bits everywhere, and winners as often as their weights say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.reference import RaceKey, exponential, fixed_weights, noise_words, race

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


def test_ids_far_from_each_other_race_independently():
    """Of two ids of one block, and of two far apart, either wins half of the races, whoever won the one before."""
    for other in (1, 5, 9000):
        weights = np.zeros(9001, np.uint64)
        weights[[0, other]] = 2**40
        wins = np.array([native.race(weights, 7, 0, position, 0) == 0 for position in range(8_000)])
        assert abs(wins.mean() - 0.5) < 6 * 0.5 / np.sqrt(8_000)
        assert abs((wins[1:] & wins[:-1]).mean() - 0.25) < 6 * 0.44 / np.sqrt(8_000)


def test_other_ids_do_not_matter():
    """Whoever of two is ahead stays ahead when a third comes in, unless that one wins."""
    rng = np.random.default_rng(0)
    weights = fixed_weights(rng.normal(0, 2, 500).astype(np.float32), 1.0)
    for seed in range(200):
        fewer = weights.copy()
        first = native.race(weights, seed, 0, 0, 0)
        fewer[rng.integers(0, 500, 250)] = 0
        if fewer[first]:
            assert native.race(fewer, seed, 0, 0, 0) == first


def test_weights_that_nobody_has_are_refused():
    with pytest.raises(ValueError, match="no weight is more than 0"):
        native.race(np.zeros(3, np.uint64), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="more than 2\\^50"):
        native.race(np.array([2**50 + 1], np.uint64), 0, 0, 0, 0)
