"""What a caller of the runtime sees: ends, stops, sessions, errors, cancellation, threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from plans.errors import RequestError
from runtime import FinishReason, Runtime

PROMPT = "def add(a, b):\n"


def test_greedy_tokens_equal_those_of_transformers(toy: Runtime, toy_recipe) -> None:
    model = Qwen3ForCausalLM.from_pretrained(toy_recipe.parent / "target").float()
    ids = toy.tokenizer.encode(PROMPT)
    with torch.no_grad():
        expected = model.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    generation = toy.generate(ids, max_new_tokens=64, ignore_eos=True)
    assert generation.token_ids == expected[0, len(ids) :].tolist()


def test_text_is_the_decoded_tokens_and_spans_add_up(toy: Runtime) -> None:
    stream = toy.stream(PROMPT, max_new_tokens=50, temperature=1.0, seed=4, ignore_eos=True)
    spans = list(stream)
    result = stream.result
    assert "".join(s.text for s in spans) == result.text == toy.tokenizer.decode(result.token_ids)
    assert [t for s in spans for t in s.token_ids] == result.token_ids
    assert result.stats.new_tokens == len(result.token_ids) == 50


def test_an_end_token_ends_the_generation_and_is_not_text(toy: Runtime) -> None:
    free = toy.generate(PROMPT, max_new_tokens=30, temperature=1.5, seed=1, ignore_eos=True)
    end = free.token_ids[17]
    first = free.token_ids.index(end)
    for drafter in ("none", "ngram"):
        ended = toy.generate(
            PROMPT, max_new_tokens=30, temperature=1.5, seed=1, eos_token_ids=[299, end], drafter=drafter
        )
        assert ended.finish_reason is FinishReason.STOP
        assert ended.token_ids == free.token_ids[: first + 1]
        assert ended.text == toy.tokenizer.decode(free.token_ids[:first])


def test_a_stop_string_ends_the_text_before_it_with_any_drafter(toy: Runtime) -> None:
    free = toy.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    stop = free.text[20:24]
    cut = free.text.index(stop)
    for drafter in ("none", "ngram"):
        stopped = toy.generate(PROMPT, max_new_tokens=60, stop=["never there", stop], drafter=drafter, ignore_eos=True)
        assert stopped.text == free.text[:cut]
        assert stopped.finish_reason is FinishReason.STOP
        assert stop in toy.tokenizer.decode(stopped.token_ids)
        assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_a_full_context_ends_with_length_at_the_same_token(toy: Runtime) -> None:
    context = toy.manifest.model.context
    prompt = [5, 6, 7, 8] * 30
    for drafter in ("none", "ngram"):
        full = toy.generate(prompt, max_new_tokens=1000, drafter=drafter, ignore_eos=True)
        assert full.finish_reason is FinishReason.LENGTH
        assert len(prompt) + len(full.token_ids) == context


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 159])
def test_prompts_at_the_borders_of_chunks_and_context(toy: Runtime, length: int) -> None:
    prompt = [(i * 31) % 299 + 1 for i in range(length)]
    plain = toy.generate(prompt, max_new_tokens=5, drafter="none", ignore_eos=True)
    assert toy.generate(prompt, max_new_tokens=5, ignore_eos=True).token_ids == plain.token_ids
    assert len(plain.token_ids) == min(5, 160 - length)


def test_cancelling_ends_between_steps_and_the_session_goes_on(toy: Runtime) -> None:
    cancel = threading.Event()
    session = toy.session()
    stream = session.stream(PROMPT, max_new_tokens=50, cancel=cancel, ignore_eos=True)
    seen: list[int] = []
    for span in stream:
        seen += span.token_ids
        cancel.set()
    assert stream.result.finish_reason is FinishReason.CANCELLED
    rest = session.generate([], max_new_tokens=50 - len(seen), ignore_eos=True).token_ids
    assert seen + rest == toy.generate(PROMPT, max_new_tokens=50, ignore_eos=True).token_ids


def test_a_stream_left_early_keeps_what_was_committed(toy: Runtime) -> None:
    session = toy.session()
    stream = session.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
    first = next(iter(stream)).token_ids
    stream.close()
    rest = session.generate([], max_new_tokens=50 - len(first), ignore_eos=True).token_ids
    assert first + rest == toy.generate(PROMPT, max_new_tokens=50, ignore_eos=True).token_ids


def test_a_session_refuses_a_second_generation_while_one_runs(toy: Runtime) -> None:
    session = toy.session()
    stream = session.stream(PROMPT, max_new_tokens=5)
    next(iter(stream))
    with pytest.raises(RequestError, match="generating already"):
        session.generate("more")


def test_sessions_in_threads_do_not_disturb_each_other(toy: Runtime) -> None:
    prompts = [f"x{i} = {i}\n" for i in range(6)]
    expected = [toy.generate(p, max_new_tokens=60, temperature=1.0, seed=i).token_ids for i, p in enumerate(prompts)]
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        found[index] = toy.generate(prompts[index], max_new_tokens=60, temperature=1.0, seed=index).token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(len(prompts))] == expected


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_logprobs_are_those_of_the_whole_sequence(toy: Runtime, toy_recipe, drafter: str) -> None:
    model = Qwen3ForCausalLM.from_pretrained(toy_recipe.parent / "target").float()
    ids = toy.tokenizer.encode(PROMPT)
    generation = toy.generate(ids, max_new_tokens=20, logprobs=3, drafter=drafter, ignore_eos=True)
    with torch.no_grad():
        logits = model(torch.tensor([ids + generation.token_ids])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    assert len(generation.logprobs) == 20
    for row, found in zip(expected, generation.logprobs, strict=True):
        assert found.logprob == pytest.approx(row[found.token_id], abs=1e-4)
        assert [t for t, _ in found.top] == np.argsort(-row)[:3].tolist()


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("", {}, "empty"),
        ([300], {}, "vocabulary"),
        ([1] * 160, {}, "context is 160"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens"),
        ("x", {"temperature": -1.0}, "temperature"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"top_p": 0.0}, "top_p"),
        ("x", {"seed": -1}, "seed"),
        ("x", {"drafter": "eagle9"}, "ngram, short, none"),
        ("x", {"stop": [""]}, "stop"),
        ("x", {"stop": 5}, "stop"),
        ("x", {"eos_token_ids": 5}, "eos_token_ids"),
        ("x", {"logprobs": 21}, "logprobs"),
        ("x", {"logprobs": "2"}, "logprobs"),
        ("x", {"top_q": 1}, "top_q"),
        ("x", {"cancel": True}, "threading.Event"),
    ],
)
def test_a_wrong_request_gets_a_sentence_and_changes_nothing(toy: Runtime, prompt, options, said: str) -> None:
    session = toy.session()
    before = session.generate("y", max_new_tokens=3, ignore_eos=True)
    if prompt == "":
        session.reset()
    with pytest.raises(RequestError, match=said):
        session.generate(prompt, **options)
    if prompt != "":
        assert session.token_ids == toy.tokenizer.encode("y") + before.token_ids
