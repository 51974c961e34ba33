"""Beam search against transformers, and what a caller of it sees."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

import outrider.runtime.__main__
from outrider import FinishReason, Runtime
from outrider.compiler.design import symbol_limits
from outrider.plans import names
from outrider.plans.errors import BusyError, RequestError
from outrider.runtime.beam_search import EarlyStopping, beam_search

PROMPT = "def add(a, b):\n"
NEW = 12


@pytest.fixture(scope="module")
def model(toy_recipe: Path) -> Iterator[Qwen3ForCausalLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the toy is too small for more
    yield Qwen3ForCausalLM.from_pretrained(toy_recipe.parent / "target").float().eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cases(toy: Runtime) -> list[tuple[list[int], list[int]]]:
    """Prompts, each without an end token and with end tokens that its beams do meet."""
    found: list[tuple[list[int], list[int]]] = []
    for number, prompt in enumerate((PROMPT, "import os\nimport", [7, 250, 31, 8, 120, 64, 3] * 6)):
        ids = toy.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        free = toy.beam_search(ids, beams=4, max_new_tokens=NEW, num_return=4, eos_token_ids=[])
        one, two = [free[0].token_ids[5]], [free[-1].token_ids[2], free[1].token_ids[8]]
        found += [(ids, []), (ids, one if number == 1 else two)]
    return found


def by_transformers(
    model: Qwen3ForCausalLM, ids: list[int], ends: Sequence[int], beams: int, penalty: float, stopping: EarlyStopping
) -> list[tuple[list[int], float]]:
    """Tokens and score of every beam."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, num_beams=beams, num_return_sequences=beams,
            length_penalty=penalty, early_stopping=stopping, eos_token_id=list(ends) or None, pad_token_id=299,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    results = []
    for row, score in zip(found.sequences[:, len(ids) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        results.append((row[:end], score))
    return results


WAYS: list[tuple[int, float, EarlyStopping]] = [*product((2, 4, 8), (-1.0, 0.0, 0.6, 1.0, 2.0), (False, True, "never"))]
SHORT = {(4, -1.0, "never"), (4, 0.0, False), (8, 0.6, True), (2, 1.0, False), (4, 2.0, "never"), (4, 2.0, False)}


@pytest.mark.parametrize(
    ("beams", "penalty", "early_stopping"),
    [way if way in SHORT else pytest.param(*way, marks=pytest.mark.long) for way in WAYS],
)
def test_tokens_and_scores_are_those_of_transformers(
    toy: Runtime, model, cases, beams: int, penalty: float, early_stopping: EarlyStopping
) -> None:
    for ids, ends in cases:
        if not ends and early_stopping is not False:
            continue  # nothing ends early
        found = toy.beam_search(
            ids, beams=beams, length_penalty=penalty, early_stopping=early_stopping, num_return=beams,
            max_new_tokens=NEW, eos_token_ids=ends,
        )  # fmt: skip
        expected = by_transformers(model, ids, ends, beams, penalty, early_stopping)
        assert [result.token_ids for result in found] == [tokens for tokens, _ in expected], (ids, ends)
        # Sums of 12 float32 log-probabilities, times up to 12: rounding grows with them.
        scores = [score for _, score in expected]
        np.testing.assert_allclose([result.score for result in found], scores, rtol=2e-6, atol=1e-4)
        for result in found:
            ended = result.token_ids[-1] in ends
            assert result.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            shown = result.token_ids[:-1] if ended else result.token_ids
            assert result.text == toy.tokenizer.decode(shown)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_one_beam_is_greedy_decoding(toy: Runtime, cases, penalty: float) -> None:
    for ids, ends in cases:
        greedy = toy.generate(ids, max_new_tokens=NEW, eos_token_ids=ends, drafter="none", logprobs=0)
        (found,) = toy.beam_search(ids, beams=1, max_new_tokens=NEW, eos_token_ids=ends, length_penalty=penalty)
        assert (found.text, found.token_ids) == (greedy.text, greedy.token_ids)
        assert found.finish_reason is greedy.finish_reason
        total = sum(entry.logprob for entry in greedy.logprobs)
        assert found.score == pytest.approx(total / len(greedy.token_ids) ** penalty, abs=1e-9)


def test_stats_count_passes_and_the_context_and_the_cache_bound_a_search(toy: Runtime) -> None:
    results = toy.beam_search([5, 6, 7, 8] * 10, beams=3, num_return=3, max_new_tokens=9, eos_token_ids=[])
    stats = results[0].stats
    assert all(result.stats is stats for result in results)
    assert (stats.prompt_tokens, stats.new_tokens) == (40, 9)
    assert (stats.prefill_passes, stats.rounds) == (2, 9)  # 16 + 16 tokens, then 8 with logits
    prompt = [(i * 31) % 299 + 1 for i in range(150)]
    found = toy.beam_search(prompt, beams=8, eos_token_ids=[])
    assert (len(found[0].token_ids), found[0].finish_reason) == (10, FinishReason.LENGTH)
    # A view holds 256 keys: 16 of the prompt, and 8 beams of 30 tokens; the last tokens need no row.
    assert len(toy.beam_search(prompt[:16], beams=8, max_new_tokens=31, eos_token_ids=[])[0].token_ids) == 31
    with pytest.raises(RequestError, match=r"8 beams of 32 new tokens after 16 need 264 KV slots, .* at most 31 new"):
        toy.beam_search(prompt[:16], beams=8, max_new_tokens=32)
    assert symbol_limits(toy.manifest.target, ())[names.LOGITS] == 8  # a plan without drafters has room too


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"beams": 13}, "beams is 13; pass a whole number from 1 to 12"),
        ({"beams": 2.0}, "beams is 2.0"),
        ({"num_return": 5}, "num_return is 5; pass a whole number from 1 to 4"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 11}, "from -10 to 10"),
        ({"early_stopping": "always"}, "'never'"),
        ({"eos_token_ids": [300]}, "eos_token_ids holds 300"),
        ({"temperature": 1.0}, "Unknown option 'temperature'"),
        ({}, "at most 64 new tokens"),
    ],
)
def test_a_wrong_request_gets_a_sentence_and_changes_nothing(toy: Runtime, options, said: str) -> None:
    session = toy.session()
    with pytest.raises(RequestError, match=said):
        beam_search(session, "x", **options)
    assert session.token_ids == []
    stream = session.stream(PROMPT, max_new_tokens=5)
    next(stream)
    with pytest.raises(BusyError, match="generating already"):
        beam_search(session, "more", max_new_tokens=5)
    stream.close()


@pytest.mark.parametrize("drafter", ["none", "ngram", "chain", "bushy", "head"])
def test_a_session_generates_afterwards_as_a_fresh_one(toy: Runtime, drafter: str) -> None:
    first, second = [5, 6, 7, 8] * 10, toy.tokenizer.encode(PROMPT)
    fresh, session = toy.session(), toy.session()
    for each in (fresh, session):
        each.generate(first, max_new_tokens=10, drafter=drafter, ignore_eos=True)
    searched = beam_search(session, second, beams=4, max_new_tokens=20, num_return=2)
    assert session.token_ids == fresh.token_ids + second
    again = beam_search(session, [], beams=4, max_new_tokens=20, num_return=2)
    assert [(r.token_ids, r.score) for r in again] == [(r.token_ids, r.score) for r in searched]
    assert again[0].stats.reused_tokens == len(session.token_ids) - 1
    options = {"max_new_tokens": 20, "temperature": 0.8, "seed": 3, "drafter": drafter, "ignore_eos": True}
    expected = fresh.generate(second, **options).token_ids
    assert session.generate([], **options).token_ids == expected
    session.truncate(len(first))
    assert session.generate([], max_new_tokens=10, drafter=drafter, ignore_eos=True).token_ids == fresh.token_ids[40:50]


class Countdown(threading.Event):
    """Set from the given look on."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("looks", "tokens"), [(0, 0), (1, 0), (2, 1), (6, 5)])
def test_a_cancelled_search_returns_its_live_beams(toy: Runtime, looks: int, tokens: int) -> None:
    session = toy.session()
    prompt = [5, 6, 7, 8] * 10  # two passes of a chunk look before the first of the search does
    results = beam_search(
        session, prompt, beams=3, num_return=3, max_new_tokens=20, eos_token_ids=[], cancel=Countdown(looks)
    )
    assert [r.finish_reason for r in results] == [FinishReason.CANCELLED] * (3 if tokens else 1)
    assert all(len(r.token_ids) == tokens for r in results)
    assert session.token_ids == prompt
    expected = toy.generate(prompt, max_new_tokens=5, ignore_eos=True).token_ids
    assert session.generate([], max_new_tokens=5, ignore_eos=True).token_ids == expected


def test_the_command_has_stable_keys(
    toy: Runtime, toy_plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runtime, "load", lambda *_, **__: toy)
    arguments = ["generate", str(toy_plan), "--prompt", PROMPT, "--max-new-tokens=16", "--ignore-eos", "--beams=3"]
    options = {"beams": 3, "max_new_tokens": 16, "eos_token_ids": [], "num_return": 2, "length_penalty": 0.6}
    expected = toy.beam_search(PROMPT, early_stopping="never", **options)
    more = ["--num-return", "2", "--length-penalty", "0.6", "--early-stopping", "never"]
    assert outrider.runtime.__main__.main([*arguments, *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"beams", "stats"}
    assert found["beams"] == [
        {"text": r.text, "token_ids": r.token_ids, "score": r.score, "finish_reason": "length"} for r in expected
    ]
    assert set(found["stats"]) == set(expected[0].stats.to_json())
    assert outrider.runtime.__main__.main([*arguments, "--beams", "4"]) == 0
    printed = capsys.readouterr()
    (best,) = toy.beam_search(PROMPT, beams=4, max_new_tokens=16, eos_token_ids=[])
    assert printed.out == best.text + "\n"
    assert f"score {best.score:.4f}, 16 tokens (length)" in printed.err.replace("\n", " ")
