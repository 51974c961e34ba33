"""Sample: weights and the rule of choice, against mathematics that shares nothing with the implementation; the
kernel is the reference, and draws have the distribution that they claim."""

from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.ops.sample import sample
from outrider.plugins.reference import RaceKey, choice, exponential, fixed_weights, noise_words, shared_exp
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.schema import FilterOrder, Purpose
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
    """A million weights, of which some would show a difference in the last bits of exp."""
    logits = np.linspace(-20, 0, 1_000_000, dtype=np.float32)
    out = np.zeros(len(logits), np.uint64)
    native.weights(logits, temperature, out)
    np.testing.assert_array_equal(out, fixed_weights(logits, temperature))


def test_weights_of_extreme_logits():
    assert fixed_weights(float32s([np.inf, 0, -np.inf, np.inf]), 1.0).tolist() == [2**40, 0, 0, 2**40]
    assert fixed_weights(float32s([3e38, -3e38]), 1e-300).tolist() == [2**40, 0]
    assert fixed_weights(float32s([-3e38]), 5.0).tolist() == [2**40]


def kept(logits, **sampling):
    return np.flatnonzero(filtered_weights(float32s(logits), Sampling(**sampling))).tolist()


@pytest.mark.parametrize(
    ("p", "sampling", "expected"),
    [
        ([0.1, 0.4, 0.2, 0.2, 0.1], {"top_k": 2}, [1, 2, 3]),  # ties at the cut stay
        ([0.5, 0.2, 0.2, 0.1], {"top_p": 0.4}, [0]),
        ([0.5, 0.2, 0.2, 0.1], {"top_p": 0.6}, [0, 1, 2]),  # the token that crosses p, and its ties
        ([0.1, 0.4, 0.4, 0.1], {"top_p": 0.0}, [1, 2]),
        ([0.3, 0.25, 0.25, 0.2], {"top_p": 0.35}, [0, 1, 2]),
        ([0.3, 0.25, 0.25, 0.2], {"top_p": 0.35, "top_k": 3}, [0]),  # 0.375 of the top three
        ([0.6, 0.3, 0.1], {"temperature": 5.0, "top_p": 0.55}, [0, 1]),
        ([0.6, 0.3, 0.1], {"temperature": 5.0, "top_p": 0.55, "filter_order": LAST}, [0]),
        ([0.6, 0.3, 0.1], {"temperature": 5.0, "min_p": 0.6}, [0, 1, 2]),
        ([0.6, 0.3, 0.1], {"temperature": 5.0, "min_p": 0.6, "filter_order": LAST}, [0]),
        ([0.4, 0.3, 0.2, 0.06, 0.04], {"min_p": 0.16}, [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.06, 0.04], {"min_p": 0.14}, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.06, 0.04], {"min_p": 0.14, "top_p": 0.5}, [0, 1]),  # min_p is of the largest, after top_p
        ([0.2, 0.3, 0.3, 0.1], {"min_p": 1.0}, [1, 2]),
        ([1, 1, 1], {"top_n_sigma": 1.0}, [0, 1, 2]),  # without a spread
        ([0, 1, 0], {"top_n_sigma": 1.0}, [1]),
        ([np.inf, 2, 1], {"top_n_sigma": 0.1}, [0]),
    ],
)
def test_filters_keep(p, sampling, expected):
    with np.errstate(divide="ignore"):
        assert kept(np.log(p), **({"temperature": 1.0} | sampling)) == expected


@cheap
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.floats(0.1, 4),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    order=st.sampled_from([0, 1]),
)
def test_top_n_sigma_keeps_logits_near_the_largest_at_any_temperature(seed, count, temperature, order):
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


POISON = -77


def one_slot(*, seed=3, stream=0, **settings):
    return SamplingSlots(np.array([Sampling(**settings)], float), np.array([seed], np.uint64), np.array([stream]))


def bind(logits, logit_indices, positions, branch, slots, purpose=Purpose.TARGET):
    tensors = {"logits": logits, "logit_indices": logit_indices, "positions": positions, "branch": branch}
    tensors["committed"] = np.full(len(logit_indices), POISON)
    return native.create("Sample", tensors | vars(slots), {"purpose": int(purpose)}), tensors["committed"]


def sample_rows(logits, slots, positions=None, purpose=Purpose.TARGET):
    rows = np.arange(len(logits))
    op, committed = bind(logits, rows, rows if positions is None else positions, np.zeros_like(rows), slots, purpose)
    op(len(rows), len(rows))
    return committed


def test_the_kernels_read_the_columns_that_are_declared():
    assert Sampling._fields == native.SAMPLING_COLUMNS


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_kernel_equals_reference(data, slots, logits_rows):
    vocabulary = data.draw(st.sampled_from([1, 2, 5, 63, 64, 65, 200, 1000]))
    new, branches = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(0, new))
    capacity = count + data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    logits = data.draw(logits_rows(capacity, vocabulary))
    rows = rng.integers(0, new, capacity)
    positions, branch = rng.integers(0, 2**40, new), rng.integers(0, branches, new)
    settings_ = data.draw(slots(branches))
    purpose = data.draw(st.sampled_from(Purpose))
    op, committed = bind(logits, rows, positions, branch, settings_, purpose)
    op(new, count)
    expected = sample(logits[:count], rows[:count], positions, branch, settings_, purpose)
    np.testing.assert_array_equal(committed[:count], expected)
    assert (committed[count:] == POISON).all()


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 50},
        {"top_k": 40_000},
        {"top_p": 0.9},
        {"top_p": 0.9, "top_k": 50},
        {"min_p": 0.05},
        {"top_n_sigma": 0.7},
        {"top_n_sigma": 1.5, "top_k": 60, "top_p": 0.99, "filter_order": 1},
        {"min_p": 0.01, "top_p": 0.9, "top_k": 50},
        {"top_p": 0.3, "filter_order": 1},
        {"min_p": 0.1, "filter_order": 1},
        {"top_p": 0.999, "top_k": 3000, "filter_order": 1},
    ],
)
def test_kernel_equals_reference_on_a_big_vocabulary(spread, filters):
    rng = np.random.default_rng(1)
    logits = (rng.normal(size=(3, 50_257)) * spread).astype(np.float32)
    logits[2] = np.round(logits[2])
    slots = one_slot(temperature=0.8, **filters)
    rows = np.arange(3)
    np.testing.assert_array_equal(sample_rows(logits, slots), sample(logits, rows, rows, np.zeros_like(rows), slots))


def test_a_draw_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, 300)).astype(np.float32)
    slots = one_slot(temperature=1.0, top_p=0.9)
    together = sample_rows(logits, slots, positions=np.arange(6) + 10)
    alone = [sample_rows(logits[i : i + 1], slots, positions=np.array([i + 10]))[0] for i in range(6)]
    assert together.tolist() == alone


@pytest.mark.parametrize("filters", [{}, {"top_k": 7, "top_p": 0.8}, {"min_p": 0.2}])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_are_the_softmax_of_what_filters_leave(temperature, filters):
    draws = 40_000
    row = np.random.default_rng(4).normal(size=16).astype(np.float32)
    chosen = sample_rows(np.tile(row, (draws, 1)), one_slot(temperature=temperature, **filters))
    p = np.exp(row.astype(np.float64) / temperature)
    order = np.argsort(-p)[: filters.get("top_k", 16)]
    before = np.cumsum(p[order]) - p[order]
    order = order[(before < filters.get("top_p", 1) * p[order].sum()) & (p[order] >= filters.get("min_p", 0) * p.max())]
    counts, expected = np.bincount(chosen, minlength=16), draws * p[order] / p[order].sum()
    assert counts[order].sum() == draws
    assert ((counts[order] - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom, one in a thousand


def test_logits_without_a_choice_are_refused_with_their_row():
    for bad, temperature, sentence in (
        (np.nan, 0.0, "contains NaN"), (-np.nan, 1.0, "contains NaN"), (-np.inf, 1.0, "-inf for every token"),
    ):  # fmt: skip
        logits = np.zeros((3, 130), np.float32)
        logits[1, 129 if np.isnan(bad) else slice(None)] = bad
        with pytest.raises(ValueError, match=rf"Sample: row 1 of logits .* {sentence}"):
            sample_rows(logits, one_slot(temperature=temperature))


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("temperature", (-0.1, np.inf, np.nan), "temperature must be finite and at least 0"),
        ("top_k", (-1, 2.5, np.nan), "top_k must be a whole number, at least 0"),
        ("top_p", (1.5, np.nan), "top_p must be in 0..1"),
        ("min_p", (-0.1, np.nan), "min_p must be in 0..1"),
        ("top_n_sigma", (np.inf,), "top_n_sigma must be finite and at least 0"),
        ("filter_order", (2,), "filter_order must be 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(name, values, sentence):
    for value in values:
        with pytest.raises(ValueError, match=f"settings of branch 0 cannot be used: {sentence}"):
            sample_rows(np.zeros((1, 4), np.float32), one_slot(**{name: value}))


def test_indices_extents_and_purposes_out_of_range_are_refused():
    branch = np.array([0, 0])
    arrays = np.zeros((2, 4), np.float32), np.array([0, 1]), np.arange(2), branch, one_slot()
    op, _ = bind(*arrays)
    for extents, sentence in (
        ((2, 3), r"extent M is 3, but the bound buffers hold 0 to 2"),
        ((-1, 0), r"extent N is -1"),
        ((1, 2), r"logit_indices\[1\] is 1; it must be in 0\.\.0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            op(*extents)
    branch[1] = 5
    with pytest.raises(ValueError, match=r"branch\[1\] is 5; it must be in 0\.\.0"):
        op(2, 2)
    with pytest.raises(ValueError, match="attribute purpose is 9"):
        bind(*arrays, purpose=9)
