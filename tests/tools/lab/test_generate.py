"""Text that a target writes: exact where greedy, drawn from its distribution elsewhere, kept between runs; how much of
it a drafter would have had accepted."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor

from outrider.compiler.models.eager import sequence_logits
from outrider.tools.lab.reference.acceptance import Acceptance, Continuation, by_depth, mean_by_depth, measure
from outrider.tools.lab.reference.drafter_text import DrafterText, GeneratedText, frequent_tokens
from outrider.tools.lab.reference.teacher import Reading, Teacher, draw, generate
from tests.tools.lab.drafter_lessons import tiny_target

VOCAB, WINDOW = 40, 24


class Counting:
    """Windows whose tokens count up from a random one."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def batch(self, batch: int, length: int) -> NDArray[np.int64]:
        return np.stack([(self.rng.randrange(VOCAB) + np.arange(length + 1)) % VOCAB for _ in range(batch)])


def teacher(sha256: str = "first") -> Teacher:
    return Teacher(tiny_target(VOCAB), Path(), Tokenizer(BPE()), sha256)


def test_greedy_rows_are_the_argmax_of_the_whole_sequence() -> None:
    model = tiny_target(VOCAB)
    prompts = torch.randint(VOCAB, (3, 5), generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0, 0.0])
    written = generate(model, prompts, temperatures, 12, torch.Generator().manual_seed(0))
    assert written.shape == (3, 17)
    assert torch.equal(written[:, :5], prompts)
    for row in (0, 2):
        expected = sequence_logits(model, written[row].tolist()).argmax(dim=-1)
        assert written[row, 5:].tolist() == expected[4:-1].tolist()


def test_draws_follow_the_distribution_at_each_row_s_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    for temperature in (0.7, 1.0):
        temperatures = torch.full((20_000,), temperature)
        draws = draw(logits.expand(20_000, 4), temperatures, torch.Generator().manual_seed(1)).bincount(minlength=4)
        torch.testing.assert_close(draws / 20_000, (logits / temperature).softmax(0), rtol=0, atol=0.015)


def test_generated_text_is_kept_grows_only_for_more_time_and_loses_a_row_that_was_cut_off(tmp_path: Path) -> None:
    text, file = GeneratedText(tmp_path, teacher(), WINDOW), tmp_path / "generated.bin"
    text.grow(0.0, Counting(), rows=3)
    assert text.rows.shape == (3, WINDOW)
    assert file.stat().st_size == 3 * WINDOW * 2
    again = GeneratedText(tmp_path, teacher(), WINDOW)
    again.grow(text.seconds, Counting(), rows=3)
    assert np.array_equal(again.rows, text.rows)
    again.grow(text.seconds + 1e-6, Counting(), rows=3)
    assert len(again.rows) == 6
    file.write_bytes(file.read_bytes()[:-5])
    assert np.array_equal(GeneratedText(tmp_path, teacher(), WINDOW).rows, again.rows[:5])
    assert file.stat().st_size == 5 * WINDOW * 2
    assert GeneratedText(tmp_path, teacher("second"), WINDOW).rows.size == 0


def test_batches_mix_training_windows_with_generated_rows() -> None:
    generated = np.arange(1000, 1000 + 6 * WINDOW, dtype=np.uint16).reshape(6, WINDOW)
    windows = DrafterText(Counting(), generated, seed=0).batch(200, 2 * WINDOW)
    assert windows.shape == (200, 2 * WINDOW + 1)
    written = windows[windows[:, 0] >= 1000]
    assert 60 < len(written) < 140
    assert {int(first - 1000) % WINDOW for first in written[:, 0]} == {0}


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_all_streams_alike() -> None:
    long, short = np.array([5] * 60 + [3] * 40, np.uint16), np.array([[7, 7, 7, 1]], np.uint16)
    assert frequent_tokens([long, short], 3, 10).tolist() == [3, 5, 7]


DEPTHS, PROMPT = 3, 4


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
