"""Uniform numbers are Philox4x32-10 with a counter of stream, position and purpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.plugins import native
from outrider.plugins.reference import philox4x32, uniform
from outrider.plugins.schema import Purpose

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


def test_kernel_gives_the_known_answer_of_random123():
    assert native.uniform(0, 0, 0, 0) == (0x6627E8D5 >> 5) << 26 | 0xE169C58D >> 6


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


def test_numbers_are_uniform():
    draws = np.array([native.uniform(5, 0, position, 0) for position in range(20_000)]) / 2.0**53
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand
