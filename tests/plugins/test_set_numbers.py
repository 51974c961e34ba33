"""The kernel that puts few changed numbers in their places (`runtime.backends.table_changes`)."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.plugins.emulator import Emulator


@pytest.mark.parametrize("library", ["emulator", "translated"])
@pytest.mark.parametrize("count", [0, 1, 50])
def test_listed_places_get_their_values(library: str, count: int, request: pytest.FixtureRequest) -> None:
    kernels: Emulator = request.getfixturevalue(library)
    rng = np.random.default_rng(count)
    numbers = rng.integers(-9, 9, 80)
    places, values = rng.permutation(80)[:count], rng.integers(-(2**62), 2**62, count)
    changes = np.concatenate(([count], np.stack((places, values), 1).ravel(), np.full(6, 10**6)))
    expected = numbers.copy()
    expected[places] = values
    kernels.launch("outrider_set_numbers", 1, 32, [ctypes.c_uint64(each.ctypes.data) for each in (numbers, changes)])
    np.testing.assert_array_equal(numbers, expected)
