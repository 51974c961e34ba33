"""Near ties: how far a choice is from another, and which differences are none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.agreement import DrafterCheck, Parting, compare_drafters, margin
from plugins.reference import Sampling, choice
from plugins.reference.choice import filtered_weights
from plugins.schemas import FilterOrder
from runtime import Runtime
from runtime.request import Options
from tests.conftest import TOY_DRAFTERS

SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    filter_order=st.sampled_from(FilterOrder),
)


def chosen(logits: np.ndarray, sampling: Sampling, u: int) -> tuple[int, tuple[int, ...]]:
    """The token, and the set that it is chosen from."""
    return choice(logits, sampling, u), tuple(np.flatnonzero(filtered_weights(logits, sampling)))


@settings(max_examples=200, deadline=None)
@given(
    sampling=SAMPLINGS, u=st.integers(0, 2**53 - 1), seed=st.integers(0, 2**32 - 1), size=st.sampled_from([2, 5, 40])
)
def test_a_disturbance_below_half_the_margin_changes_nothing(sampling: Sampling, u: int, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * 2).astype(np.float32)
    apart = margin(logits, sampling, u)
    before = chosen(logits, sampling, u)
    for _ in range(10):
        shift = rng.choice([-1.0, 1.0], size) * 0.499 * min(apart, 2.0)  # weights end at exp(-28)
        disturbed = (logits + shift).astype(np.float32)
        if sampling.temperature == 0.0:
            assert choice(disturbed, sampling, u) == before[0]
        elif apart > 1e-5:  # else float32 logits are no finer
            assert chosen(disturbed, sampling, u)[0] == before[0]
            assert set(chosen(disturbed, sampling, u)[1]) == set(before[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_margin_is_no_larger_than_what_changes_the_choice(temperature: float) -> None:
    """Of two tokens: moved by half the margin and a little, towards the other, the choice is the other."""
    logits, sampling = np.array([1.0, 0.2], np.float32), Sampling(temperature=temperature)
    for u in np.linspace(0.01, 0.99, 20):
        draw = int(u * 2**53)
        token = choice(logits, sampling, draw)
        half = 0.5 * margin(logits, sampling, draw) + 1e-5
        towards = np.where(np.arange(2) == token, -half, half).astype(np.float32)
        assert choice(logits + towards, sampling, draw) != token


def test_chains_have_no_near_ties(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that gives drafters another seed: every run parts, and whatever the tolerance, chains fail."""
    session = toy.session()
    generate = session.generate

    def other_seed(*args: object, **options: object) -> object:
        if options["drafter"] != "none":
            options["seed"] = 99
        return generate(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "generate", other_seed)
    options = Options(temperature=1.0, seed=1, max_new_tokens=12)
    checks = compare_drafters(session, [[5, 9, 33]], TOY_DRAFTERS, options, tolerance=100.0)
    trees = {"bushy", "head"}
    assert {name for name, check in checks.items() if check.passed} == trees & set(TOY_DRAFTERS)
    assert all(len(check.partings) == 1 for check in checks.values())


def test_tokens_per_verify() -> None:
    parting = Parting(0, 1, 2, 3, 0.5, near_tie=False)
    check = DrafterCheck(tokens=9, rounds=3, partings=[parting])
    assert (check.tokens_per_verify, check.passed, DrafterCheck().tokens_per_verify) == (3.0, False, 0.0)
    assert check.to_json()["tokens_per_verify"] == 3.0
