"""Weights and the rule of choice, against mathematics that shares nothing with the implementation."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.reference import RaceKey, choice, exponential, fixed_weights, noise_words, shared_exp
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.schema import FilterOrder
from tests.properties import cheap

KEYS = st.builds(RaceKey, st.integers(0, 2**64 - 1), st.integers(0, 9), st.integers(0, 2**31), st.just(0))
KEY = RaceKey(0, 0, 0, 0)
LAST = FilterOrder.TEMPERATURE_LAST


def float32s(values):
    return np.array(values, dtype=np.float32)


def test_shared_exp_is_accurate_to_the_last_places():
    getcontext().prec = 40
    x = np.concatenate([np.linspace(-28, 0, 4001), -np.logspace(-17, 1, 500)])
    exact = [Decimal(value).exp() for value in x.tolist()]
    errors = [abs(Decimal(e) / t - 1) for e, t in zip(shared_exp(x).tolist(), exact, strict=True)]
    assert max(errors) < Decimal("5e-16")


def test_shared_exp_of_zero_is_one_and_it_never_falls():
    x = np.linspace(-28, 0, 300_001)
    assert shared_exp(np.zeros(1))[0] == 1.0
    assert (np.diff(shared_exp(x)) >= 0).all()
    assert (shared_exp(x) <= 1.0).all()


@cheap
@given(data=st.data(), vocabulary=st.sampled_from([1, 2, 63, 64, 65, 700]))
def test_kernel_weights_equal_reference_bit_for_bit(data, vocabulary, logits_rows):
    logits = data.draw(logits_rows(1, vocabulary))[0]
    temperature = data.draw(st.sampled_from([1e-300, 1e-3, 0.3, 1.0, 1.7, 1e2, 1e300]) | st.floats(0.01, 10))
    out = np.full(vocabulary, 7, dtype=np.uint64)
    native.weights(logits, temperature, out)
    np.testing.assert_array_equal(out, fixed_weights(logits, temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.73])
def test_kernel_weights_equal_reference_over_the_whole_range(temperature):
    """So many that a difference in the last bits of exp would show through the rounding down."""
    logits = np.linspace(-20, 0, 1_000_000, dtype=np.float32)
    out = np.zeros(len(logits), np.uint64)
    native.weights(logits, temperature, out)
    np.testing.assert_array_equal(out, fixed_weights(logits, temperature))


def test_weights_are_exp_in_units_of_two_to_the_minus_40():
    logits = float32s(np.linspace(-20, 3, 1000))
    expected = [math.floor(math.exp((float(value) - 3.0) / 0.7) * 2**40) for value in logits]
    found = fixed_weights(logits, 0.7).astype(np.float64)
    assert np.abs(found - expected).max() <= 1


def test_weights_of_extreme_logits():
    assert fixed_weights(float32s([np.inf, 0, -np.inf, np.inf]), 1.0).tolist() == [2**40, 0, 0, 2**40]
    assert fixed_weights(float32s([3e38, -3e38]), 1e-300).tolist() == [2**40, 0]
    assert fixed_weights(float32s([-3e38]), 5.0).tolist() == [2**40]


@pytest.mark.parametrize("logits", [[np.nan, 1], [-np.nan, 1], [-np.inf, -np.inf]])
def test_weights_refuse_rows_without_a_choice(logits):
    with pytest.raises(ValueError, match="NaN or are all -inf"):
        native.weights(float32s(logits), 1.0, np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match=r"NaN|-inf"):
        choice(float32s(logits), Sampling(), KEY)


def kept(logits, **sampling):
    return np.flatnonzero(filtered_weights(float32s(logits), Sampling(**sampling))).tolist()


def test_greedy_takes_the_lowest_id_of_a_tie():
    assert choice(float32s([1, 5, 5, 2]), Sampling(), KEY) == 1
    assert choice(float32s([-0.0, 0.0]), Sampling(), KEY) == 0


def test_top_k_keeps_ties_at_the_cut():
    assert kept([1, 3, 2, 2, 0], temperature=1.0, top_k=2) == [1, 2, 3]


def test_top_p_keeps_the_token_that_crosses_p_and_its_ties():
    logits = np.log([0.5, 0.2, 0.2, 0.1])
    assert kept(logits, temperature=1.0, top_p=0.4) == [0]
    assert kept(logits, temperature=1.0, top_p=0.6) == [0, 1, 2]
    assert kept(logits, temperature=1.0, top_p=0.95) == [0, 1, 2, 3]


def test_top_p_of_zero_keeps_the_most_likely():
    assert kept([1, 4, 4, 2], temperature=1.0, top_p=0.0) == [1, 2]


def test_top_p_works_on_the_renormalised_survivors_of_top_k():
    logits = np.log([0.3, 0.25, 0.25, 0.2])  # the first alone has 0.3 of all, 0.375 of the top three
    assert kept(logits, temperature=1.0, top_p=0.35) == [0, 1, 2]
    assert kept(logits, temperature=1.0, top_p=0.35, top_k=3) == [0]


def test_filter_order_decides_which_distribution_top_p_sees():
    logits = np.log([0.6, 0.3, 0.1])
    assert kept(logits, temperature=5.0, top_p=0.55) == [0, 1]
    assert kept(logits, temperature=5.0, top_p=0.55, filter_order=LAST) == [0]


def test_min_p_is_a_share_of_the_largest_behind_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    assert kept(logits, temperature=1.0, min_p=0.16) == [0, 1, 2]
    assert kept(logits, temperature=1.0, min_p=0.14) == [0, 1, 2, 3]
    assert kept(logits, temperature=1.0, min_p=0.14, top_p=0.5) == [0, 1]
    assert kept(logits, temperature=1.0, min_p=0.7, top_p=0.95) == [0, 1]
    assert kept([2, 5, 5, 1], temperature=1.0, min_p=1.0) == [1, 2]


@cheap
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.floats(0.1, 4),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    order=st.sampled_from([0, 1]),
)
def test_top_n_sigma_keeps_logits_near_the_largest_whatever_the_temperature(seed, count, temperature, order):
    logits = np.random.default_rng(seed).normal(0, 2, 200).astype(np.float32)
    logits[::7] = -np.inf  # which have no part in the deviation
    finite = logits[np.isfinite(logits)].astype(np.float64)
    below, most = finite.max() - logits.astype(np.float64), count * finite.std()
    heat = 1.0 if order else temperature
    unit = heat * 2.0**-40 * np.exp(min(most, 28 * heat) / heat)  # of a weight there, as a distance
    near = 2.0**-6 + 2 * unit  # distances count in units of 2**-8
    found = set(kept(logits, temperature=temperature, top_n_sigma=count, filter_order=order))
    weighs = set(np.flatnonzero(below / heat < 27)) & set(np.flatnonzero(below / temperature < 27))
    assert set(np.flatnonzero(below <= most - near)) & weighs <= found
    assert found <= set(np.flatnonzero(below <= most + near))


def test_top_n_sigma_of_rows_without_a_spread():
    assert kept([3, 3, 3], temperature=1.0, top_n_sigma=1.0) == [0, 1, 2]
    assert kept([3, 2.999, 2.998], temperature=1.0, top_n_sigma=0.1) == [0, 1, 2]  # within a unit of the largest
    assert kept([-np.inf, 3, -np.inf], temperature=1.0, top_n_sigma=1.0) == [1]
    assert kept([np.inf, 3, 2], temperature=1.0, top_n_sigma=0.1) == [0]


def test_filter_order_decides_which_distribution_min_p_sees():
    logits = np.log([0.6, 0.3, 0.1])
    assert kept(logits, temperature=5.0, min_p=0.6) == [0, 1, 2]
    assert kept(logits, temperature=5.0, min_p=0.6, filter_order=LAST) == [0]


@cheap
@given(seed=st.integers(0, 2**32 - 1), top_p=st.floats(0.01, 0.999), top_k=st.integers(0, 30))
def test_filters_keep_the_smallest_likely_set(seed, top_p, top_k):
    """Against float64 softmax and sorting; the random cut is never within rounding of a sum."""
    logits = np.random.default_rng(seed).normal(size=30).astype(np.float32) * 3
    order = np.argsort(-logits)[: top_k or 30]
    probability = np.exp(logits[order].astype(np.float64))
    before = np.cumsum(probability / probability.sum()) - probability / probability.sum()
    expected = order[before < top_p]
    weights = filtered_weights(logits, Sampling(temperature=1.0, top_k=top_k, top_p=top_p))
    assert set(np.flatnonzero(weights)) == set(expected.tolist())


@cheap
@given(logits=st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=40), key=KEYS, temperature=st.floats(0.5, 5))
def test_choice_is_the_largest_of_log_probabilities_with_gumbel_noise(logits, key, temperature):
    """But for what rounding decides."""
    row = float32s(logits)
    x = choice(row, Sampling(temperature=temperature), key)
    gumbel = -np.log(exponential(noise_words(np.arange(len(row)), key)).astype(np.float64))
    raced = row.astype(np.float64) / temperature + gumbel
    assert raced[x] >= raced.max() - 1e-4
