"""Kernels of `runtime.backends` that hand tokens from one round to the next, and that change few numbers."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.plugins.emulator import Emulator

ROWS, LENGTH = 4, 37  # three branches, and tokens of none


@pytest.mark.parametrize("library", ["emulator", "translated"])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_tokens_go_through_the_pool(library: str, count: int, request: pytest.FixtureRequest) -> None:
    kernels: Emulator = request.getfixturevalue(library)
    rng = np.random.default_rng(count)
    pool = rng.integers(0, 99, (ROWS, LENGTH))
    # Places that differ, so that the order of threads makes no difference; branches beyond the pool share its last row.
    places = rng.permutation(ROWS * (LENGTH - 1))[: min(count, ROWS * (LENGTH - 1))]
    branch, positions = places // (LENGTH - 1), places % (LENGTH - 1)
    branch = np.where(branch == ROWS - 1, rng.choice([-1, ROWS - 1, 2**32], len(places)), branch)
    token_ids = np.where(rng.random(len(places)) < 0.5, -1, rng.integers(100, 200, len(places)))
    row = np.where((branch >= 0) & (branch < ROWS - 1), branch, ROWS - 1)

    expected = np.where(token_ids < 0, pool[row, positions], token_ids)
    launch(kernels, "outrider_take_tokens", [pool, positions, branch, token_ids], len(places))
    np.testing.assert_array_equal(token_ids, expected)

    logit_indices = np.flatnonzero(rng.random(len(places)) < 0.7)
    committed = np.where(rng.random(len(logit_indices)) < 0.2, -1, rng.integers(0, 99, len(logit_indices)))
    kept = pool.copy()
    kept[row[logit_indices], positions[logit_indices] + 1] = np.maximum(committed, 0)
    launch(kernels, "outrider_keep_tokens", [pool, committed, logit_indices, positions, branch], len(logit_indices))
    np.testing.assert_array_equal(pool, kept)


@pytest.mark.parametrize("library", ["emulator", "translated"])
def test_places_outside_the_pool_are_left_alone(library: str, request: pytest.FixtureRequest) -> None:
    kernels: Emulator = request.getfixturevalue(library)
    pool = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    before = pool.copy()
    branch, token_ids = np.zeros(3, np.int64), np.full(3, -1)
    positions = np.array([LENGTH - 1, -2, 2**40])
    launch(kernels, "outrider_keep_tokens", [pool, np.full(3, 7), np.arange(3), positions, branch], 3)
    np.testing.assert_array_equal(pool, before)
    launch(kernels, "outrider_take_tokens", [pool, positions, branch, token_ids], 3)
    np.testing.assert_array_equal(token_ids, [LENGTH - 1, -1, -1])


@pytest.mark.parametrize("library", ["emulator", "translated"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_listed_places_get_their_values(library: str, count: int, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(count)
    numbers = rng.integers(-9, 9, 80)
    places, values = rng.permutation(80)[:count], rng.integers(-(2**62), 2**62, count)
    changes = np.concatenate(([count], np.stack((places, values), 1).ravel(), np.full(6, 10**6)))
    expected = numbers.copy()
    expected[places] = values
    pointers = [ctypes.c_uint64(each.ctypes.data) for each in (numbers, changes)]
    request.getfixturevalue(library).launch("outrider_set_numbers", 1, 32, pointers)
    np.testing.assert_array_equal(numbers, expected)


def launch(kernels: Emulator, kernel: str, arrays: list[np.ndarray], count: int) -> None:
    pointers = [ctypes.c_uint64(array.ctypes.data) for array in arrays]
    kernels.launch(kernel, 1, 32, [*pointers, *map(ctypes.c_int64, (count, ROWS, LENGTH))])
