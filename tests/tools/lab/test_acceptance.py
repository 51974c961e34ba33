"""Acceptance by depth, on cases counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from outrider.tools.lab.reference.acceptance import Acceptance, Continuation, by_depth, mean_by_depth, measure
from outrider.tools.lab.reference.teacher import Reading, Teacher, generate
from tests.tools.lab.drafter_lessons import tiny_target

VOCAB, DEPTHS, PROMPT = 40, 3, 4


def test_a_depth_counts_the_chains_that_got_to_it() -> None:
    hits = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], bool)
    assert by_depth(hits) == [3 / 4, 2 / 3, 1 / 2]
    assert by_depth(np.zeros((2, 2), bool)) == [0.0, 0.0]
    assert Acceptance([0.5, 0.4, 0.1], [], [], []).tokens_per_verify(2) == pytest.approx(1 + 0.5 + 0.2)


def test_overlap_of_two_steps_equals_the_whole_tree_of_chains() -> None:
    """Against all chains of two tokens, with q drawing and p accepting min(1, p / q) of its draws."""
    rng = np.random.default_rng(0)
    p1, q1 = rng.dirichlet(np.ones(3)), rng.dirichlet(np.ones(3))
    p2, q2 = rng.dirichlet(np.ones(3), 3), rng.dirichlet(np.ones(3), 3)
    both = sum(min(p1[x], q1[x]) * np.minimum(p2[x], q2[x]).sum() for x in range(3))
    first = np.minimum(p1, q1).sum()
    drawn = rng.choice(3, 200_000, p=p1)
    overlap = np.stack([np.full(len(drawn), first), np.minimum(p2, q2).sum(axis=1)[drawn]], axis=1)
    kept = np.stack([np.minimum(1, q1 / p1)[drawn], np.ones(len(drawn))], axis=1)
    assert mean_by_depth(overlap, kept) == pytest.approx([first, both / first], abs=3e-3)


def test_a_drafter_that_is_the_target_is_always_right_and_one_that_errs_at_depth_two_is_not() -> None:
    model = tiny_target(VOCAB)
    teacher = Teacher(model, Path(), Tokenizer(BPE()), "")
    prompt = torch.randint(VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(0)).expand(2, -1)
    written = generate(model, prompt, torch.tensor([0.0, 1.0]), 20, torch.Generator().manual_seed(0))
    continuations = [Continuation(row, PROMPT, t) for row, t in zip(written, (0.0, 1.0), strict=True)]

    def the_target(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        chains = len(ids) - 1 - depths
        return torch.stack([reading.logits[0, 1 + d : 1 + d + chains] for d in range(depths)])

    def erring(ids: Tensor, reading: Reading, depths: int) -> Tensor:
        drafts = the_target(ids, reading, depths).clone()
        drafts[1] = -drafts[1]
        return drafts

    right = measure(teacher, continuations, the_target, depths=DEPTHS)
    assert right.greedy == right.greedy_children == [1.0] * DEPTHS
    assert right.overlap == pytest.approx([1.0] * DEPTHS)
    wrong = measure(teacher, continuations, erring, depths=DEPTHS)
    assert wrong.greedy == [1.0, 0.0, 0.0]
    assert wrong.overlap[0] == pytest.approx(1.0)
    assert wrong.overlap[1] < 0.5
    assert "| greedy | 1.000 | 0.000 | 0.000 |" in wrong.table()
