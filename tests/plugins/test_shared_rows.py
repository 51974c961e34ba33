"""Rows of logits that many blocks share choose what the CPU's kernels choose, in whatever order the blocks run."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans import names
from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.cuda import LAUNCHES
from outrider.plugins.cuda.launches import SHARE
from outrider.plugins.reference import SamplingSlots, sample
from outrider.plugins.reference.choice import fixed_weights
from outrider.plugins.schema import FilterOrder
from tests.plugins.accept_step import equal_slots, fault_on_the_cpu, slots_of
from tests.plugins.emulator import ORDERS, Emulator
from tests.plugins.test_cuda_kernels import FEW, POISON, accept_outputs, compare, step_of

CHOOSING = ("Sample", "TreeAccept", "ChainAccept")
SETTINGS = [
    Sampling(0.0, 0, 1.0, 0.0, 0),
    Sampling(0.7, 0, 1.0, 0.0, 0),
    Sampling(1.0, 0, 1.0, 0.05, 0),
    Sampling(1.3, 0, 1.0, 0.02, 1),
    Sampling(1.1, 0, 1.0, 0.0, 1, 2.0),
    Sampling(1.0, 50, 1.0, 0.0, 0),
    Sampling(1.0, 0, 0.9, 0.0, 0),
    Sampling(0.6, 20, 0.95, 0.0, 0),
    Sampling(1.5, 40, 0.95, 0.1, 1),
    Sampling(1.2, 0, 0.9, 0.01, 1, 2.5),
    Sampling(100.0, 0, 1.0, 1.0, 0),
    Sampling(1e-3, 0, 0.9, 0.0, 0),
]
BIG = [32_000, 50_257, pytest.param(128_256, marks=pytest.mark.long), 152_064]
USUAL = 8  # of the settings: those after them are of flat or of steep distributions


def rows_of(logits: np.ndarray, slots: SamplingSlots) -> dict[str, np.ndarray]:
    """Inputs of Sample: row i is of branch i, with branches again from the first on."""
    count = len(logits)
    branch = np.arange(count) % len(slots.seed)
    return {
        "logits": logits, "logit_indices": np.arange(count), "positions": np.arange(count) + 7, "branch": branch,
        **vars(slots),
    }  # fmt: skip


def greedy_too(slots: SamplingSlots) -> SamplingSlots:
    """The branches, and a greedy one after them."""
    columns = zip(vars(slots).items(), vars(equal_slots(1)).values(), strict=True)
    return SamplingSlots(**{name: np.concatenate((column, greedy)) for (name, column), greedy in columns})


def check(kernels, logits: np.ndarray, slots: SamplingSlots) -> None:
    """What is chosen, and p / q of each row's likeliest token: that is of the sum of all weights that filters leave."""
    count, size = logits.shape
    tensors = rows_of(logits, slots)
    compare(kernels, "Sample", tensors, {"committed": np.full(count, POISON)}, (count, count))

    likeliest = np.repeat(logits.argmax(axis=1), 2)
    roots, children = np.arange(0, 2 * count, 2), np.arange(1, 2 * count, 2)
    chains = rows_of(np.zeros((2 * count, size), np.float32), greedy_too(slots))
    chains["logits"][roots], chains["branch"][roots] = logits, tensors["branch"]
    chains["branch"][children] = len(slots.seed)
    chains |= {"token_ids": likeliest, "parent": np.where(np.arange(2 * count) % 2, np.arange(2 * count) - 1, -1)}
    chains |= {
        "draft_probs": np.full((2 * count, size), 1 / size, np.float32),
        "skip_sample_adjustment": np.zeros(len(slots.seed) + 1, np.int64),
        "by_rejection": np.ones(len(slots.seed) + 1, np.int64),
    }
    outputs = accept_outputs(2 * count, 2 * count, count) | {"trials": np.full((2 * count, 2), float(POISON))}
    compare(kernels, "ChainAccept", chains, outputs, (2 * count, 2 * count))


@pytest.mark.parametrize("op", CHOOSING)
def test_a_row_of_a_big_vocabulary_has_at_least_32_blocks_and_little_scratch(op) -> None:
    launch = LAUNCHES[op]
    for vocabulary in (128_000, 128_256, 151_936, 152_064, 256_000):
        sizes = {names.LOGITS: 3, "V": vocabulary}
        assert launch.blocks(sizes) >= 3 * 32
        assert sum(scratch.size(sizes) for scratch in launch.scratch.values()) <= 3 * (vocabulary + 2**18 + 64)
    assert [launch.blocks({names.LOGITS: 1, "V": v}) for v in (1, SHARE, SHARE + 1)] == [1, 1, 2]


@pytest.mark.parametrize("vocabulary", BIG)
def test_big_vocabularies(fast_kernels, vocabulary) -> None:
    logits = np.random.default_rng(vocabulary).normal(size=(USUAL, vocabulary)) * 3
    check(fast_kernels, logits.astype(np.float32), slots_of(SETTINGS[:USUAL]))


@pytest.mark.parametrize("spread", [3.0, 0.05])
def test_flat_and_steep_distributions(fast_kernels, spread) -> None:
    logits = np.random.default_rng(3).normal(size=(len(SETTINGS), 50_257)) * spread
    check(fast_kernels, logits.astype(np.float32), slots_of(SETTINGS))


@pytest.mark.parametrize("vocabulary", BIG)
def test_big_vocabularies_with_ties_and_masks(fast_kernels, vocabulary) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = np.round(rng.normal(size=(USUAL, vocabulary)) * 2).astype(np.float32)
    logits[rng.random(logits.shape) < 0.9] = -np.inf
    logits[:3, :] = -np.inf  # a grammar leaves few
    logits[:3, rng.integers(0, vocabulary, 5)] = 1.5
    check(fast_kernels, logits, slots_of(SETTINGS[:USUAL]))


@pytest.mark.parametrize("vocabulary", [1030, 33_001])
def test_the_reference_chooses_the_same(kernels, vocabulary) -> None:
    logits = (np.random.default_rng(5).normal(size=(len(SETTINGS), vocabulary)) * 3).astype(np.float32)
    tensors, committed = rows_of(logits, slots_of(SETTINGS)), np.full(len(logits), POISON)
    assert kernels.create("Sample", tensors | {"committed": committed})(len(logits), len(logits)) == 0
    expected = sample(*(tensors[n] for n in ("logits", "logit_indices", "positions", "branch")), slots_of(SETTINGS))
    assert committed.tolist() == expected.tolist()


@FEW
@given(data=st.data(), vocabulary=st.sampled_from([1023, 1025, 2050, 5001]))
def test_every_setting_on_adversarial_logits(fast_kernels, data, vocabulary, slots, logits_rows) -> None:
    check(fast_kernels, data.draw(logits_rows(3, vocabulary)), data.draw(slots(3)))


@pytest.mark.parametrize("order", FilterOrder)
def test_all_filters_with_each_other(fast_kernels, order) -> None:
    settings = [
        (*four, int(order))
        for four in product((0.0, 0.4, 1.6), (0, 1, 37, 3000), (0.0, 0.3, 0.97, 1.0), (0.0, 0.03, 1.0))
    ]
    logits = (np.random.default_rng(2).normal(size=(len(settings), 4099)) * 2).astype(np.float32)
    check(fast_kernels, logits, slots_of(settings))


@pytest.mark.parametrize("settings", [(1.0, 0, 0.9999, 0.0, 0), (1.0, 20_000, 1.0, 0.0, 0), (1.0, 30, 0.5, 0.0, 1)])
@pytest.mark.parametrize("vocabulary", [17_001, 40_003])
def test_more_candidates_than_a_list_holds(fast_kernels, settings, vocabulary) -> None:
    logits = (np.random.default_rng(4).normal(size=(2, vocabulary)) * 0.2).astype(np.float32)
    logits[1] = 0.25  # all of them tie
    check(fast_kernels, logits, slots_of([settings]))


@pytest.mark.parametrize("vocabulary", [2500, 20_000])
def test_a_nucleus_that_ends_exactly_between_two_tokens(fast_kernels, vocabulary) -> None:
    """The sum of weights, and not what shares tell of it, decides on which side: one unit of 2^-53 apart."""
    row = (np.random.default_rng(6).normal(size=vocabulary) * 3).astype(np.float32)
    weights = np.sort(fixed_weights(row, 1.0))[::-1]
    total, sums = int(weights.sum()), np.cumsum(weights)
    shares = [(int(sums[i]) * 2**53 // total + unit) / 2**53 for i in (0, 3, 40, 300) for unit in (0, 1)]
    check(fast_kernels, np.tile(row, (len(shares), 1)), slots_of([(1.0, 0, share, 0.0, 0) for share in shares]))


def test_logits_that_differ_and_weigh_the_same(kernels) -> None:
    """All of them are kept, also those that no group's largest logit stands for."""
    logits = np.arange(20_000, dtype=np.float32) * np.float32(1e-17)
    logits[17] = 1
    weights = fixed_weights(logits, 1.0)
    assert np.unique(weights).size <= 3
    check(kernels, logits[None], slots_of([(1.0, 0, 0.3, 0.0, 0)]))


def test_a_nucleus_of_tokens_that_hardly_weigh_anything(fast_kernels) -> None:
    """Weights of a few units, of which many are alike."""
    logits = np.full((4, 20_000), -25.5, np.float32) - np.linspace(0, 2.2, 20_000, dtype=np.float32)
    logits[:, 17] = 0
    total = int(fixed_weights(logits[0], 1.0).sum())
    few = [1 - ((total - 2**40) * share) / total for share in (0.99, 0.9, 0.5, 0.1)]
    check(fast_kernels, logits, slots_of([(1.0, 0, share, 0.0, 0) for share in few]))


@pytest.mark.parametrize("vocabulary", [4097, 4098, 4099, 4100])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_rows_at_any_address(kernels, vocabulary, offset) -> None:
    """16 bytes are loaded at once where a row's address is a multiple of 16, and nowhere else."""
    memory = np.zeros(vocabulary * 5 + 4, np.float32)
    logits = memory[offset : offset + vocabulary * 5].reshape(5, vocabulary)
    logits[...] = np.random.default_rng(1).normal(size=logits.shape) * 3
    check(kernels, logits, slots_of(SETTINGS[:5]))


@pytest.mark.parametrize("place", [0, 1023, 1024, 4098])
@pytest.mark.parametrize(("bad", "fault"), [(np.nan, 1), (-np.float32(np.nan), 1), (np.inf, 0)])
def test_what_is_no_number_is_found_in_any_share(kernels, place, bad, fault) -> None:
    logits = np.random.default_rng(1).normal(size=(2, 4099)).astype(np.float32)
    logits[1, place] = bad
    tensors, committed = rows_of(logits, equal_slots(1, temperature=0.8)), np.full(2, POISON)
    assert kernels.create("Sample", tensors | {"committed": committed})(2, 2) == fault
    assert committed[0] >= 0
    assert committed[1] == (POISON if fault else place)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_row_of_which_everything_is_masked_is_a_fault(kernels, settings) -> None:
    tensors = rows_of(np.full((1, 4099), -np.inf, np.float32), slots_of([settings]))
    assert kernels.create("Sample", tensors | {"committed": np.full(1, POISON)})(1, 1) == 2


def big_step(op: str):
    """Trees, or chains, of a vocabulary of several shares."""
    rng = np.random.default_rng(8)
    slots = slots_of(SETTINGS[1:9:2])
    tensors, tree = step_of(
        rng, slots, 4, 5, 5001, lambda n: (rng.normal(size=(n, 5001)) * 3).astype(np.float32),
        1.0 if op == "ChainAccept" else 0.4,
    )  # fmt: skip
    count, new = len(tensors["logit_indices"]), len(tensors["branch"])
    if op == "Sample":
        return tensors, {"committed": np.full(count, POISON)}, (new, count)
    outputs = accept_outputs(new, count, 4)
    if op == "ChainAccept":
        q = rng.dirichlet(np.full(5001, 0.01), count).astype(np.float32)
        tree |= {"draft_probs": q, "skip_sample_adjustment": np.array([0, 0, 1, 0]), "by_rejection": np.ones(4, int)}
        outputs["trials"] = np.full((count, 2), float(POISON))
    return tensors | tree, outputs, (new, count)


@pytest.mark.parametrize("op", CHOOSING)
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_run_in_any_order(emulator: Emulator, op, order) -> None:
    with emulator.blocks_in_order(order):
        compare(emulator, op, *big_step(op))


@pytest.mark.parametrize("op", CHOOSING)
@pytest.mark.parametrize("most_threads", [1, 32, 100, 256])
def test_a_choice_does_not_depend_on_the_number_of_threads(emulator: Emulator, op, most_threads) -> None:
    tensors, outputs, extents = big_step(op)
    theirs = {name: array.copy() for name, array in outputs.items()}
    native.create(op, tensors | theirs)(*extents)
    assert emulator.create(op, tensors | outputs, most_threads=most_threads)(*extents) == 0
    for name, array in theirs.items():
        np.testing.assert_array_equal(outputs[name], array, err_msg=name)


@pytest.mark.parametrize("place", [0, 1024, 5000])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -0.5])
def test_a_drafters_fault_is_found_in_any_share(kernels, place, bad) -> None:
    tensors, outputs, extents = big_step("ChainAccept")
    child = next(m for m in range(1, extents[1]) if tensors["parent"][tensors["logit_indices"][m]] >= 0)
    assert tensors["parent"][tensors["logit_indices"][child]] == tensors["logit_indices"][child - 1]
    tensors["draft_probs"][child, place] = bad
    assert fault_on_the_cpu("ChainAccept", tensors, outputs, extents, {}) == 3
    assert kernels.create("ChainAccept", tensors | outputs)(*extents) == 3


def test_rejection_of_greedy_rows_and_of_rows_without_filters(kernels) -> None:
    tensors, outputs, extents = big_step("ChainAccept")
    for settings in ((0.0, 0, 1.0, 0.0, 0), (1.0, 0, 1.0, 0.0, 0), (1.0, 0, 1.0, 0.3, 1)):
        slots = slots_of([settings] * 4)
        compare(kernels, "ChainAccept", tensors | vars(slots), outputs, extents)
