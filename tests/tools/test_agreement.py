"""Where runs part, and margins: within half of one nothing changes, beyond it something does."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider import Generation, Runtime
from outrider.plans.sampling import Sampling
from outrider.plugins.reference import RaceKey, choice
from outrider.plugins.reference.choice import filtered_weights
from outrider.plugins.schema import FilterOrder, Purpose
from outrider.runtime.options.options import Options
from outrider.tools.parting import Parting, margin
from outrider.tools.verify.agreement import DrafterCheck, compare_drafters

LOGITS = st.lists(st.integers(-400, 400).map(lambda hundredths: hundredths / 100), min_size=5, max_size=5, unique=True)
SAMPLINGS = st.builds(
    Sampling, st.sampled_from([0.0, 0.7, 1.5]), st.sampled_from([0, 3]), st.sampled_from([1.0, 0.6]),
    st.sampled_from([0.0, 0.2]), st.sampled_from(FilterOrder), st.sampled_from([0.0, 0.0, 1.0]),
)  # fmt: skip
DISTURBANCES = np.array(list(product([-1, 1], repeat=5)))


@given(logits=LOGITS, sampling=SAMPLINGS, seed=st.integers(0, 2**64 - 1))
def test_the_margin_is_twice_the_least_disturbance_that_changes_anything(
    logits: list[float], sampling: Sampling, seed: int
) -> None:
    row = np.array(logits, np.float32)
    key = RaceKey(seed, 0, 7, Purpose.TARGET)
    found = margin(row, sampling, key)
    assume(1e-3 < found < 8)

    def changes(by: float) -> bool:
        disturbed = (row + by * DISTURBANCES).astype(np.float32)
        kept = filtered_weights(row, sampling) > 0
        return any(
            choice(other, sampling, key) != choice(row, sampling, key)
            or ((filtered_weights(other, sampling) > 0) != kept).any()
            for other in disturbed
        )

    assert not changes(0.499 * found)
    assert changes(0.501 * found) or sampling.top_n_sigma


def test_a_run_that_parts_is_found_with_its_margin(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the tolerance it is a near tie, which an exact target does not have."""
    session, prompt = toy.session(), [5, 6, 7, 8] * 5
    generate = session.generate

    def other_seed(ids: list[int], **options: Any) -> Generation:
        return generate(ids, **options | {"seed": 9} if options["drafter"] == "bushy" else options)

    monkeypatch.setattr(session, "generate", other_seed)
    plain, drafted = (generate(prompt, whole=True, temperature=1.0, seed=seed).token_ids for seed in (8, 9))
    first = next(i for i in range(len(plain)) if plain[i] != drafted[i])
    options = Options(temperature=1.0, seed=8, max_new_tokens=first + 5)
    for tolerance, exact in ((1e-4, False), (np.inf, False), (np.inf, True)):
        checks = compare_drafters(session, [prompt], ["bushy", "chain"], options, tolerance, exact=exact)
        assert (checks["chain"].equal_runs, checks["chain"].partings) == (1, [])
        (parting,) = checks["bushy"].partings
        assert (parting.index, parting.expected, parting.found) == (first, plain[first], drafted[first])
        assert parting.margin > 1e-4
        assert parting.near_tie == checks["bushy"].passed == (tolerance > 1 and not exact)


def test_tokens_per_verify() -> None:
    parting = Parting(0, 20, 1, 2, 3, 0.5)
    check = DrafterCheck(tokens=9, rounds=3, partings=[parting])
    assert (check.tokens_per_verify, check.passed, DrafterCheck().tokens_per_verify) == (3.0, False, 0.0)
    assert check.to_json()["tokens_per_verify"] == 3.0
