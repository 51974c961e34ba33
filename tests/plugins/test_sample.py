"""Sample: the kernel is the reference, and draws have the distribution that they claim."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.reference import SamplingSlots, sample
from outrider.plugins.schema import Purpose

POISON = -77


def one_slot(*, seed=3, stream=0, **settings):
    return SamplingSlots(np.array([Sampling(**settings)], float), np.array([seed], np.uint64), np.array([stream]))


def bind(logits, logit_indices, positions, branch, slots, purpose=Purpose.TARGET):
    committed = np.full(len(logit_indices), POISON)
    tensors = {
        "logits": logits,
        "logit_indices": logit_indices,
        "positions": positions,
        "branch": branch,
        "committed": committed,
    }
    return native.create("Sample", tensors | vars(slots), {"purpose": int(purpose)}), committed


def sample_rows(logits, slots, positions=None, purpose=Purpose.TARGET):
    rows = np.arange(len(logits))
    op, committed = bind(logits, rows, rows if positions is None else positions, np.zeros_like(rows), slots, purpose)
    op(len(rows), len(rows))
    return committed


def test_the_kernels_read_the_columns_that_are_declared():
    assert (
        native.SAMPLING_COLUMNS
        == Sampling._fields
        == (*("temperature", "top_k", "top_p", "min_p", "filter_order", "top_n_sigma"),)
    )


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


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    draws = 40_000
    row = np.random.default_rng(4).normal(size=16).astype(np.float32)
    chosen = sample_rows(np.tile(row, (draws, 1)), one_slot(temperature=temperature))
    expected = np.exp(row.astype(np.float64) / temperature)
    expected *= draws / expected.sum()
    chi_square = ((np.bincount(chosen, minlength=16) - expected) ** 2 / expected).sum()
    assert chi_square < 37.7  # 15 degrees of freedom, one in a thousand


def test_filtered_tokens_are_never_drawn_and_the_others_keep_their_proportions():
    draws = 20_000
    row = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1])).astype(np.float32)
    chosen = sample_rows(np.tile(row, (draws, 1)), one_slot(temperature=1.0, top_k=4, top_p=0.8))
    counts = np.bincount(chosen, minlength=5)
    assert counts[[0, 4]].tolist() == [0, 0]  # 0.4, 0.3 and 0.15 of 0.95 cross 0.8
    expected = draws * np.array([0.4, 0.15, 0.3]) / 0.85
    assert ((counts[[1, 2, 3]] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom


def test_a_draw_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(6, 300)).astype(np.float32)
    slots = one_slot(temperature=1.0, top_p=0.9)
    together = sample_rows(logits, slots, positions=np.arange(6) + 10)
    alone = [sample_rows(logits[i : i + 1], slots, positions=np.array([i + 10]))[0] for i in range(6)]
    assert together.tolist() == alone


def test_purposes_and_streams_draw_apart():
    logits = np.zeros((50, 1000), np.float32)
    base = sample_rows(logits, one_slot(temperature=1.0))
    assert (base != sample_rows(logits, one_slot(temperature=1.0), purpose=Purpose.DRAFT)).any()
    assert (base != sample_rows(logits, one_slot(temperature=1.0, stream=1))).any()


def test_low_temperature_is_greedy():
    logits = np.random.default_rng(0).normal(size=(20, 100)).astype(np.float32)
    np.testing.assert_array_equal(sample_rows(logits, one_slot(temperature=1e-5)), logits.argmax(1))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.float32("nan")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_refused_with_its_row(bad, temperature):
    logits = np.zeros((3, 130), np.float32)
    logits[1, 129] = bad
    with pytest.raises(ValueError, match=r"Sample: row 1 of logits .* contains NaN"):
        sample_rows(logits, one_slot(temperature=temperature))


def test_a_row_without_any_token_is_refused():
    logits = np.full((1, 70), -np.inf, np.float32)
    with pytest.raises(ValueError, match=r"row 0 of logits .* -inf for every token"):
        sample_rows(logits, one_slot(temperature=1.0))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"temperature": -0.1}, "temperature must be finite and at least 0"),
        ({"temperature": np.inf}, "temperature must be finite"),
        ({"temperature": np.nan}, "temperature must be finite"),
        ({"top_k": -1}, "top_k must be a whole number, at least 0"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_k": np.nan}, "top_k must be a whole number"),
        ({"top_p": 1.5}, "top_p must be in 0..1"),
        ({"top_p": np.nan}, "top_p must be in 0..1"),
        ({"min_p": -0.1}, "min_p must be in 0..1"),
        ({"min_p": np.nan}, "min_p must be in 0..1"),
        ({"top_n_sigma": np.inf}, "top_n_sigma must be finite and at least 0"),
        ({"filter_order": 2}, "filter_order must be 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(setting, sentence):
    with pytest.raises(ValueError, match=f"settings of branch 0 cannot be used: {sentence}"):
        sample_rows(np.zeros((1, 4), np.float32), one_slot(**setting))


def test_indices_and_extents_out_of_range_are_refused():
    rows, branch = np.array([0, 1]), np.array([0, 0])
    op, _ = bind(np.zeros((2, 4), np.float32), rows, np.arange(2), branch, one_slot())
    with pytest.raises(ValueError, match=r"extent M is 3, but the bound buffers hold 0 to 2"):
        op(2, 3)
    with pytest.raises(ValueError, match=r"extent N is -1"):
        op(-1, 0)
    with pytest.raises(ValueError, match=r"logit_indices\[1\] is 1; it must be in 0\.\.0"):
        op(1, 2)
    branch[1] = 5
    with pytest.raises(ValueError, match=r"branch\[1\] is 5; it must be in 0\.\.0"):
        op(2, 2)


def test_an_unknown_purpose_is_refused():
    with pytest.raises(ValueError, match="attribute purpose is 9"):
        native.create(
            "Sample",
            {"logits": np.zeros((1, 4), np.float32), "logit_indices": np.zeros(1, int), "positions": np.zeros(1, int)}
            | {"branch": np.zeros(1, int), "committed": np.zeros(1, int)}
            | vars(one_slot()),
            {"purpose": 9},
        )
