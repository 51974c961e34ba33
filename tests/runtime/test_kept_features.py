"""Features that outlive their pass: rows of the target's buffer that no step writes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.runtime.drafters.kept_features import KeptFeatures

STEP, KEPT = 12, 6


class Rows:
    """The target's features, a number a row."""

    features = np.zeros(STEP + KEPT, np.int64)

    def copy_rows(self, source: tuple[str, str, int], to: tuple[str, str, int], count: int) -> None:
        assert to[2] >= STEP
        self.features[to[2] : to[2] + count] = self.features[source[2] : source[2] + count]


@given(steps=st.lists(st.tuples(st.lists(st.integers(0, STEP - 1), unique=True, max_size=5), st.integers(0, 4))))
def test_what_is_kept_stays_until_it_is_released(steps: list[tuple[list[int], int]]) -> None:
    """Each step gives features, some of which are kept after those that wait; then the first ones are released."""
    rows = Rows()
    kept = KeptFeatures(rows, STEP, KEPT)  # type: ignore[arg-type]
    waiting, expected, number = np.zeros(0, np.int64), list[int](), 0
    for given_rows, released in steps:
        rows.features[:STEP] = np.arange(number, number + STEP)
        both = np.concatenate((waiting, sorted(given_rows))).astype(np.int64)
        wanted = expected + rows.features[sorted(given_rows)].tolist()
        found = kept.keep(both)
        number += STEP
        if found is None:
            assert len(wanted) > KEPT
            continue
        waiting, expected = found, wanted
        assert kept.lasting(waiting) == len(waiting)
        rows.features[:STEP] = -1
        assert rows.features[waiting].tolist() == expected
        kept.release(waiting[:released])
        waiting, expected = waiting[released:], expected[released:]
