"""Rows of logits that many blocks share choose what the CPU's kernels choose, in any order of the blocks."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plans.sampling import Sampling
from outrider.plugins import native
from outrider.plugins.ops.row_choices import SamplingSlots
from outrider.plugins.reference.choice import fixed_weights
from outrider.plugins.schema import FilterOrder
from tests.plugins.accept_step import POISON, equal_slots, fault_on_the_cpu, outputs_of, random_step, slots_of
from tests.plugins.emulator import ORDERS, Emulator
from tests.plugins.test_cuda_kernels import FEW, compare

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


def check(kernels, logits: np.ndarray, slots: SamplingSlots) -> None:
    """The choices, and p / q of each row's likeliest token: that is of the sum of all weights that filters leave."""
    count, size = logits.shape
    tensors = rows_of(logits, slots)
    compare(kernels, "Sample", tensors, outputs_of("Sample", count, count, 0), (count, count))

    new, last = 2 * count, len(slots.seed)  # a greedy branch follows, of the drafted tokens
    columns = zip(vars(slots).items(), vars(equal_slots(1)).values(), strict=True)
    chains = rows_of(np.zeros((new, size), np.float32), slots)
    chains |= {name: np.concatenate((column, greedy)) for (name, column), greedy in columns}
    chains["logits"][::2], chains["branch"][::2], chains["branch"][1::2] = logits, tensors["branch"], last
    chains |= {
        "token_ids": np.repeat(logits.argmax(axis=1), 2),
        "parent": np.where(np.arange(new) % 2, np.arange(new) - 1, -1),
        "draft_probs": np.full((new, size), 1 / size, np.float32),
        "skip_sample_adjustment": np.zeros(last + 1, np.int64), "by_rejection": np.ones(last + 1, np.int64),
    }  # fmt: skip
    compare(kernels, "ChainAccept", chains, outputs_of("ChainAccept", new, new, count), (new, new))


@pytest.mark.parametrize("vocabulary", BIG)
def test_big_vocabularies_also_with_ties_and_masks(fast_kernels, vocabulary) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.normal(size=(USUAL, vocabulary)) * 3).astype(np.float32)
    check(fast_kernels, logits, slots_of(SETTINGS[:USUAL]))
    if vocabulary == 50_257:
        for spread in (1, 0.016):  # steep and flat
            check(fast_kernels, np.tile(logits[:1], (len(SETTINGS), 1)) * np.float32(spread), slots_of(SETTINGS))
    logits = np.round(logits)
    logits[rng.random(logits.shape) < 0.9] = -np.inf
    logits[:3, :] = -np.inf  # a grammar leaves few
    logits[:3, rng.integers(0, vocabulary, 5)] = 1.5
    check(fast_kernels, logits, slots_of(SETTINGS[:USUAL]))


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
    """The sum of weights, and not what shares report of it, decides on which side: one unit of 2^-53 apart."""
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


def big_step(op: str):
    """Trees, or chains, of a vocabulary of several shares."""
    rng = np.random.default_rng(8)
    tensors, outputs, extents = random_step(
        rng,
        op,
        slots_of(SETTINGS[1:9:2]),
        4,
        5,
        5001,
        lambda n: (rng.normal(size=(n, 5001)) * 3).astype(np.float32),
        by_rejection=np.ones(4, int),
    )
    if op == "ChainAccept":
        tensors |= {"skip_sample_adjustment": np.array([0, 0, 1, 0])}
    return tensors, outputs, extents


@pytest.mark.parametrize("op", CHOOSING)
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_run_in_any_order_and_with_any_number_of_threads(emulator: Emulator, op, order) -> None:
    tensors, outputs, extents = big_step(op)
    with emulator.blocks_in_order(order):
        compare(emulator, op, tensors, outputs, extents)
    native.create(op, tensors | outputs)(*extents)
    for most_threads in (1, 32, 100, 256):
        own = {name: np.full_like(array, POISON) for name, array in outputs.items()}
        assert emulator.create(op, tensors | own, most_threads=most_threads)(*extents) == 0
        for name, array in own.items():
            np.testing.assert_array_equal(array, outputs[name], err_msg=name)


@pytest.mark.parametrize("place", [0, 1024, 4098])
def test_faults_are_found_in_any_share(kernels, place) -> None:
    slots = equal_slots(1, temperature=0.8)
    for bad, fault in ((np.nan, 1), (-np.float32(np.nan), 1), (np.inf, 0)):
        logits = np.random.default_rng(1).normal(size=(2, 4099)).astype(np.float32)
        logits[1, place] = bad
        tensors, committed = rows_of(logits, slots), np.full(2, POISON)
        assert kernels.create("Sample", tensors | {"committed": committed})(2, 2) == fault
        assert committed[0] >= 0
        assert committed[1] == (POISON if fault else place)
    for settings in SETTINGS:
        tensors = rows_of(np.full((1, 4099), -np.inf, np.float32), slots_of([settings]))
        assert kernels.create("Sample", tensors | outputs_of("Sample", 1, 1, 1))(1, 1) == 2
    for bad in (np.nan, np.inf, -0.5):
        tensors, outputs, extents = big_step("ChainAccept")
        rows = tensors["logit_indices"]
        child = next(m for m in range(1, extents[1]) if tensors["parent"][rows[m]] == rows[m - 1])
        tensors["draft_probs"][child, place] = bad
        assert fault_on_the_cpu("ChainAccept", tensors, outputs, extents, {}) == 3
        assert kernels.create("ChainAccept", tensors | outputs)(*extents) == 3
