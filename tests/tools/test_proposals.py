"""Proposals at the target's draw: hits are counted as the runtime would accept, on distributions known by heart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.reference.tree_expand import chosen_log_probs
from tools.proposals import Places, chosen


def places(p: list[float], q: list[float], draws: list[float]) -> Places:
    rows = len(draws)
    return Places(torch.tensor([p] * rows).double(), torch.tensor([q] * rows).double(), torch.tensor(draws).double())


def test_the_choice_is_the_inverse_cdf() -> None:
    p = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).double().expand(5, -1)
    assert chosen(p, torch.tensor([0.0, 0.2, 0.25, 0.74, 0.76]).double()).tolist() == [0, 0, 2, 2, 3]


def test_equal_distributions_are_always_hit_by_their_cdf() -> None:
    found = places([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4], [0.05, 0.15, 0.5, 0.9])
    assert found.hits(found.cdf()) == [1.0, 1.0]
    assert found.hits(found.likeliest())[0] == 0.25
    assert found.overlap == pytest.approx(1.0)


def test_other_distributions_are_hit_where_they_agree() -> None:
    found = places([0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7], [0.05, 0.5, 0.95])
    assert found.hits(found.cdf()) == [2 / 3, 1.0]  # at 0.5 the target chooses 0, its drafter 3
    assert found.hits(found.likeliest())[0] == 1 / 3


def test_the_window_is_the_score_of_tree_expand() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=9)
    q = np.exp(logits) / np.exp(logits).sum()
    row = torch.from_numpy(q)[None]
    found = Places(row, row, torch.tensor([0.4]).double())
    expected = np.exp(chosen_log_probs(logits, 0.4, (1.0, 0, 1.0), 0.2, 0.3))
    np.testing.assert_allclose(found.window(0.2, 0.3)[0].numpy(), expected, atol=1e-12)
