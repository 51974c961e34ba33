"""Text that a target writes: exact where greedy, drawn from its distribution elsewhere, kept between runs."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE

from outrider.compiler.models.eager import sequence_logits
from outrider.tools.lab.reference.drafter_text import DrafterText, GeneratedText, frequent_tokens
from outrider.tools.lab.reference.teacher import Teacher, draw, generate
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
