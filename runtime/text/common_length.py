"""How far two token lists agree."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences of one type, by bisection: slices compare in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # they agree up to low, and not up to high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
