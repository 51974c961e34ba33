"""What a caller of the runtime sees: ends, stops, sessions, errors, cancellation, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from outrider import BusyError, FinishReason, OutriderError, PlanError, RequestError, Runtime
from outrider.runtime.options.options import Options
from outrider.runtime.rounds.parts import Parts
from tests.conftest import TOY_DRAFTERS

PROMPT = "def add(a, b):\n"


def test_greedy_tokens_equal_those_of_transformers_alone_and_assisted(toy: Runtime, toy_recipe) -> None:
    """Assisted by the checkpoint that our `chain` and `bushy` draft with."""
    target, assistant = (
        Qwen3ForCausalLM.from_pretrained(toy_recipe.parent / name).float() for name in ("target", "drafter")
    )
    asked: list[object] = []
    assistant.register_forward_hook(lambda *call: asked.append(call))
    for text in (PROMPT, "import os\n", "class Tree:\n    def __init__(self"):
        ids = toy.tokenizer.encode(text)
        given = {"inputs": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        (alone,), (assisted,) = (target.generate(**given, **options, assistant_model=a) for a in (None, assistant))
        assert assisted.tolist() == alone.tolist()
        for drafter in ("none", *TOY_DRAFTERS):
            run = toy.generate(ids, drafter=drafter, max_new_tokens=48, ignore_eos=True, auto_disable=False)
            assert ids + run.token_ids == alone.tolist()
    assert asked, "transformers never asked the assistant"


def test_text_is_the_decoded_tokens_and_spans_add_up(toy: Runtime) -> None:
    stream = toy.stream(PROMPT, max_new_tokens=50, temperature=1.0, seed=4, ignore_eos=True)
    spans = list(stream)
    result = stream.result
    assert "".join(s.text for s in spans) == result.text == toy.tokenizer.decode(result.token_ids)
    assert [t for s in spans for t in s.token_ids] == result.token_ids
    assert result.stats.new_tokens == len(result.token_ids) == 50


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 159])
def test_prompts_at_the_borders_of_chunks_and_context(toy: Runtime, length: int) -> None:
    prompt = [(i * 31) % 299 + 1 for i in range(length)]
    plain = toy.generate(prompt, max_new_tokens=5, drafter="none", ignore_eos=True)
    assert toy.generate(prompt, max_new_tokens=5, ignore_eos=True).token_ids == plain.token_ids
    assert len(plain.token_ids) == min(5, 160 - length)


def test_errors_come_from_the_package_and_are_those_that_python_would_raise(toy: Runtime, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="top_p is 2"):
        toy.generate(PROMPT, top_p=2)
    session = toy.session()
    stream = session.stream(PROMPT)
    next(stream)
    with pytest.raises(BusyError, match="generating already") as busy:  # the same call may be served later
        session.generate(PROMPT)
    with pytest.raises(PlanError, match="is not a plan") as no_plan:  # a file is no argument
        Runtime.load(tmp_path)
    stream.close()
    assert not any(isinstance(each.value, ValueError) for each in (busy, no_plan))
    assert all(issubclass(each, OutriderError) for each in (BusyError, PlanError, RequestError))


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
        ([300], {}, "vocabulary"),
        ([1] * 160, {}, "context is 160"),
        ("x", {"drafter": "eagle9"}, ", ".join([*TOY_DRAFTERS, "none"])),
        ("x", {"eos_token_ids": [10**9]}, "eos_token_ids holds 1000000000, .* ids go from 0 to 299"),
        ("x", {"min_tokens": 41, "max_new_tokens": 40}, "pass a whole number from 0 to max_new_tokens, which is 40"),
        *((wrong, {}, r"[Tt]oken ids") for wrong in ([1, "a"], [1.5], b"abc", {1: 2}, np.zeros((2, 2), np.int64))),
    ],
)
def test_a_wrong_request_gets_a_sentence_and_changes_nothing(toy: Runtime, prompt, options, said: str) -> None:
    session = toy.session()
    with pytest.raises(RequestError, match="empty"):
        session.generate("")
    before = session.generate("y", max_new_tokens=3, ignore_eos=True)
    with pytest.raises(RequestError, match=said):
        session.generate(prompt, **options)
    for length in (-1, 99, 1.0):
        with pytest.raises(RequestError, match="length"):
            session.truncate(length)
    assert session.token_ids == toy.tokenizer.encode("y") + before.token_ids


CONVERSATION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_messages_are_the_chat_template_s_prompt(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "system: be brief\nuser: hello\nassistant:"
    ids = toy.tokenizer.encode(text, add_special_tokens=False)
    expected = toy.generate(ids, max_new_tokens=12, ignore_eos=True)
    options = Options(max_new_tokens=12, ignore_eos=True)
    assert toy.generate(messages=CONVERSATION, **options).token_ids == expected.token_ids
    assert toy.submit(messages=CONVERSATION, **options).result(60).token_ids == expected.token_ids
    stream = toy.stream(messages=tuple(CONVERSATION), **options)
    assert [token for span in stream for token in span.token_ids] == expected.token_ids
    monkeypatch.setattr(toy.tokenizer, "_chat_template", None)
    for call in (toy.generate, toy.submit, toy.session().stream):
        with pytest.raises(RequestError, match="The plan has no chat template"):
            call(messages=CONVERSATION)  # type: ignore[operator]


def test_a_session_given_the_whole_conversation_computes_what_is_new(toy: Runtime) -> None:
    options = Options(max_new_tokens=6, ignore_eos=True)
    session = toy.session()
    first = session.generate(messages=CONVERSATION, **options)
    longer = [*CONVERSATION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "more"}]
    found = session.stream(messages=longer, **options).result
    assert found.token_ids == toy.generate(messages=longer, **options).token_ids
    assert found.stats.reused_tokens >= first.stats.prompt_tokens - 1
    assert session.generate(messages=CONVERSATION, **options).token_ids == first.token_ids


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "exactly one of the two; neither was given"),
        ({"prompt": "x", "messages": CONVERSATION}, "exactly one of the two; both were given"),
        ({"messages": []}, "at least one message.* not empty"),
        ({"messages": "hello"}, "list of at least one message.* not str"),
        ({"messages": ["hello"]}, r"messages\[0\] must be a mapping with a text under \"role\""),
        ({"messages": [*CONVERSATION, {"role": "user", "contents": "x"}]}, r'messages\[2\]: "content" is missing'),
        ({"messages": [{"role": "user", "content": 5}]}, r'messages\[0\]: "content" is 5'),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"messages\[0\]\.content holds half a character"),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, "context is 160"),
    ],
)
def test_wrong_messages_get_a_sentence(toy: Runtime, arguments, said: str) -> None:
    for call in (toy.generate, toy.stream, toy.submit):
        with pytest.raises(RequestError, match=said):
            call(**arguments)
    session = toy.session()
    session.generate("y", max_new_tokens=3, ignore_eos=True)
    before = session.token_ids
    if arguments:  # without any, a session continues
        with pytest.raises(RequestError, match=said):
            session.generate(**arguments)
    assert session.token_ids == before


def test_a_cancellation_while_a_drafter_catches_up_ends_the_generation(
    toy: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that was disabled has more to compute again than a step takes."""
    cancel, rests = threading.Event(), [True]
    monkeypatch.setattr("outrider.runtime.drafters.adaptive.AdaptiveSpeculation.disabled", property(lambda _: rests[0]))
    monkeypatch.setattr(
        "outrider.runtime.drafters.adaptive.AdaptiveSpeculation.drafting", property(lambda _: not rests[0])
    )
    catch_up = Parts.catch_up_drafters

    def cancelled(*given: Any, **also: Any) -> None:
        if not rests[0]:
            cancel.set()
        catch_up(*given, **also)

    monkeypatch.setattr(Parts, "catch_up_drafters", cancelled)
    session, found = toy.session(), list[int]()
    stream = session.stream(range(1, 9), drafter="head", max_new_tokens=100, ignore_eos=True, cancel=cancel)
    for span in stream:
        found += span.token_ids
        rests[0] = len(found) < 60
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert 60 <= len(found) < 90
    expected = toy.session().generate([*range(1, 9), *found], max_new_tokens=10, drafter="none", ignore_eos=True)
    assert session.generate([], max_new_tokens=10, drafter="none", ignore_eos=True).token_ids == expected.token_ids


def test_a_cancellation_taken_back_during_prefill_still_ends_the_generation(toy: Runtime) -> None:
    class Pulse(threading.Event):
        """Set once, at the second look: the first chunk has been computed, the second has not."""

        looks = 0

        def is_set(self) -> bool:
            self.looks += 1
            return self.looks == 2

    session = toy.session()
    prompt = [5, 6, 7, 8] * 15
    cancelled = session.generate(prompt, max_new_tokens=10, cancel=Pulse(), ignore_eos=True)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert cancelled.token_ids == []
    rest = session.generate([], max_new_tokens=10, ignore_eos=True)
    assert rest.token_ids == toy.generate(prompt, max_new_tokens=10, ignore_eos=True).token_ids


def test_times_leave_out_what_the_caller_does_between_spans(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the last one, which brings text that was held back: it might have begun a stop string."""
    options = Options(max_new_tokens=5, drafter="none", ignore_eos=True)
    last = toy.generate(PROMPT, **options).text[-1]
    now = [0.0]
    for module in ("step_loop", "rounds.parts"):
        monkeypatch.setattr(f"outrider.runtime.{module}.perf_counter", lambda: now[0])
    stream = toy.session().stream(PROMPT, stop=[f"{last} and more"], **options)
    for _ in stream:
        now[0] += 1000.0
    assert stream.result.stats.total_ms == 0.0


def test_a_failed_stream_is_an_error_and_the_session_continues(toy: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    session = toy.session()
    stream = session.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    seen = list(next(stream).token_ids)
    with monkeypatch.context() as patch:
        patch.setattr("outrider.runtime.kv.slots.SlotTable.commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    with pytest.raises(RuntimeError, match="failed"):
        _ = stream.result
    done = session.token_ids[len(toy.tokenizer.encode(PROMPT)) :]
    assert done[: len(seen)] == seen
    rest = session.generate([], max_new_tokens=30 - len(done), ignore_eos=True).token_ids
    assert done + rest == toy.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids
