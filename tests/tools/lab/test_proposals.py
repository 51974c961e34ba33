"""Hits of proposals in races, on distributions whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.plans.sampling import Sampling
from outrider.plugins.reference import DraftSettings
from outrider.plugins.reference.tree_expand import chosen_log_probs
from outrider.tools.lab.proposals import CHILDREN, DOUBT, Places, rows

TARGET = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).repeat(20_000, 3)
TARGET = torch.cat([TARGET[:, :4], torch.zeros(20_000, 8, dtype=torch.float64)], 1)


def found(drafter: torch.Tensor) -> Places:
    noise = torch.empty_like(TARGET).exponential_(generator=torch.Generator().manual_seed(1))
    return Places(TARGET, drafter, noise)


def test_a_drafter_that_is_the_target_always_hits_and_without_the_noise_as_often_as_the_likeliest_is_drawn() -> None:
    same = found(TARGET)
    assert same.overlap == pytest.approx(1)
    assert same.hits(same.race(0.0)) == [1.0] * len(CHILDREN)
    assert same.hits(same.drafter) == pytest.approx([0.5, 0.8, 0.95, 1.0], abs=0.02)


def test_a_drafter_that_says_nothing_wins_by_the_noise_alone() -> None:
    flat = found(torch.full_like(TARGET, 1 / 12))
    first = flat.hits(flat.race(0.0))[0]
    assert 1 / 12 + 0.02 < first < 0.5  # ids with little noise win the target's race more often


def test_what_is_built_is_among_the_rows() -> None:
    names = dict(rows(found(TARGET)))
    assert f"race {DOUBT}, as built" in names
    assert len(names) == 6


def test_the_race_is_the_score_of_tree_expand() -> None:
    rng = np.random.default_rng(3)
    logits, noise = rng.normal(size=9), rng.exponential(size=9)
    q = torch.from_numpy(np.exp(logits) / np.exp(logits).sum())[None]
    settings = DraftSettings(noise[None].astype(np.float32), np.array([Sampling(temperature=1.0)]))
    expected = np.exp(chosen_log_probs(logits, settings, 0, 0.3))
    found = Places(q, q, torch.from_numpy(settings.noise.astype(np.float64)))
    np.testing.assert_allclose(found.race(0.3)[0].numpy(), expected, atol=1e-12)
