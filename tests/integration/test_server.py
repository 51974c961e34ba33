"""The server, used by OpenAI's own client over loopback."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.drafters.adaptive import AdaptiveSpeculation
from outrider.runtime.step_loop import StepLoop
from tests.conftest import call_before
from tests.integration.served import KEY, client_of, get, listening, settle, wait_until

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def alone(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


@pytest.fixture(scope="module")
def runtime(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))


@pytest.fixture(scope="module")
def address(runtime: Runtime) -> Iterator[str]:
    with listening(runtime, api_key=KEY, max_body_bytes=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address, KEY) as found:
        yield found


OURS = {"ignore_eos": True}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, alone: Runtime) -> None:
    expected = alone.generate([5, 6, 7], max_new_tokens=20, ignore_eos=True)
    own: dict[str, Any] = {"model": "toy", "prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0}
    events = list(client.completions.create(**own, **USAGE, extra_body=OURS | {"drafter": "bushy"}))
    assert "".join(event.choices[0].text for event in events[:-1]) == expected.text
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    assert len({event.id for event in events}) == 1


def test_several_prompts_and_choices(client: openai.OpenAI, alone: Runtime) -> None:
    prompts = ["import os", "def main"]
    found = client.completions.create(
        model="toy", prompt=prompts, max_tokens=6, temperature=1.0, seed=3, n=2, extra_body=OURS
    )
    expected = [
        alone.generate(prompt, max_new_tokens=6, temperature=1.0, seed=3, stream_id=choice, ignore_eos=True)
        for prompt in prompts
        for choice in range(2)
    ]
    assert [(choice.index, choice.text) for choice in found.choices] == [(i, e.text) for i, e in enumerate(expected)]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(each.stats.prompt_tokens for each in expected[::2])
    assert found.usage.completion_tokens == 24 == found.usage.total_tokens - found.usage.prompt_tokens
    assert found.object == "text_completion"


@pytest.fixture
def always_drafting(monkeypatch: Patch) -> None:
    """Whether it pays or not."""
    monkeypatch.setattr(AdaptiveSpeculation, "disabled", property(lambda _: False))
    monkeypatch.setattr(AdaptiveSpeculation, "drafting", property(lambda _: True))


def speculation_of(answer: Any) -> dict[str, Any]:
    """`metrics.speculative_decoding`, with everything that AIPerf holds against a response checked."""
    found = answer.metrics["speculative_decoding"]
    histogram, accepted = found["acceptance_histogram"], found["num_accepted_draft_tokens"]
    assert found["num_spec_steps"] == sum(histogram) > 0
    assert accepted == sum(tokens * rounds for tokens, rounds in enumerate(histogram)) <= found["num_draft_tokens"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert found["mean_acceptance_length"] == 1 + accepted / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == accepted / found["num_draft_tokens"]
    return dict(found)


@pytest.mark.usefixtures("always_drafting")
@pytest.mark.parametrize(("drafter", "longest"), [("bushy", 3), ("chain", 4)])
def test_an_answer_says_how_much_of_its_drafts_was_accepted(client: openai.OpenAI, drafter: str, longest: int) -> None:
    own: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 12}
    own["extra_body"] = OURS | {"drafter": drafter}
    for create, asked in (
        (client.completions.create, {"prompt": [5, 6, 7]}),
        (client.chat.completions.create, {"messages": HELLO}),
    ):
        found = create(**own, **asked)
        speculation = speculation_of(found)
        assert speculation["num_spec_tokens"] == longest
        # A round adds a token to those that it accepts, but where the limit cuts it.
        tokens = speculation["num_accepted_draft_tokens"] + speculation["num_spec_steps"]
        assert tokens <= found.usage.completion_tokens + 1
        *pieces, last = create(**own, **asked, **USAGE)
        assert speculation_of(last)["num_spec_tokens"] == longest
        assert not any(hasattr(piece, "metrics") for piece in pieces)


@pytest.mark.parametrize(("drafter", "tokens"), [("none", 8), ("chain", 1)])
def test_without_a_draft_an_answer_has_no_metrics(client: openai.OpenAI, drafter: str, tokens: int) -> None:
    own: dict[str, Any] = {"model": "toy", "max_tokens": tokens, "extra_body": OURS | {"drafter": drafter}}
    assert not hasattr(client.completions.create(prompt=[5, 6], **own), "metrics")


def test_log_probabilities(client: openai.OpenAI, alone: Runtime) -> None:
    expected = alone.generate([5, 6], max_new_tokens=5, logprobs=2, ignore_eos=True)
    own: dict[str, Any] = {"model": "toy", "max_tokens": 5, "temperature": 0, "extra_body": OURS}
    found = client.completions.create(prompt=[5, 6], logprobs=2, **own).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert all(len(top) <= 2 for top in found.top_logprobs or [])
    chat: Any = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=2, **own)
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * 5
    joined = b"".join(bytes(entry.bytes) for entry in content)
    assert joined.decode(errors="replace") == chat.choices[0].message.content
    pieces = client.completions.create(prompt=[5, 6], logprobs=2, stream=True, **own)
    parts = [piece.choices[0].logprobs for piece in pieces if piece.choices[0].logprobs is not None]
    assert [token for each in parts for token in each.tokens] == found.tokens
    assert [offset for each in parts for offset in each.text_offset] == found.text_offset


def test_each_end_token_of_a_plan_ends_a_text(toy: Runtime, ending_plan: tuple[Path, dict[str, int]]) -> None:
    """And is no part of it, in whole texts and streams, through the server and in Python."""
    plan, lengths = ending_plan
    python = Runtime.load(plan, threads=1)
    with listening(Runtime.load(plan, threads=1)) as address, client_of(address) as client:
        for (prompt, length), drafter in product(lengths.items(), ("none", "chain")):
            whole = toy.generate(prompt, max_new_tokens=30, ignore_eos=True)
            text = toy.tokenizer.decode(whole.token_ids[: length - 1])
            found = python.generate(prompt, max_new_tokens=30, drafter=drafter)
            assert (found.token_ids, found.text) == (whole.token_ids[:length], text)
            own: dict[str, Any] = {"model": "toy", "prompt": prompt, "max_tokens": 30, "temperature": 0}
            own["extra_body"] = {"drafter": drafter}
            (choice,) = client.completions.create(**own).choices
            assert (choice.text, choice.finish_reason) == (text, "stop")
            pieces = list(client.completions.create(stream=True, **own))
            assert "".join(piece.choices[0].text for piece in pieces) == text


def test_a_chat_is_its_template_continued(client: openai.OpenAI, alone: Runtime) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    tokenizer = alone.tokenizer
    prompt = tokenizer.encode(tokenizer.apply_chat_template(plain), add_special_tokens=False)
    expected = alone.generate(prompt, max_new_tokens=10)
    own: dict[str, Any] = {"model": "toy", "messages": messages, "temperature": 0, "max_completion_tokens": 10}
    found = client.chat.completions.create(**own)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", expected.text)
    pieces = list(client.chat.completions.create(stream=True, **own))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    again = client.chat.completions.create(**own)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == expected.text


@pytest.mark.parametrize("drafter", ["none", "chain"])
def test_a_special_token_is_a_stop(client: openai.OpenAI, alone: Runtime, drafter: str) -> None:
    """It prints nothing, so that its spelling would never be found in a text."""
    token, spelled = next(iter(alone.tokenizer.special_tokens.items()))
    own: dict[str, Any] = {"model": "toy", "prompt": [5, 6], "max_tokens": 9, "logit_bias": {str(token): 100}}
    own["extra_body"] = OURS | {"drafter": drafter}
    assert client.completions.create(**own).choices[0].finish_reason == "length"
    (choice,) = client.completions.create(stop=["#", spelled], **own).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    with pytest.raises(openai.BadRequestError, match=r"stop.0. holds the special token .* pass it as") as refused:
        client.completions.create(stop=[f"a{spelled}"], **own)
    assert refused.value.param == "stop[0]"


def test_without_a_seed_samples_differ(client: openai.OpenAI) -> None:
    found = [client.completions.create(model="toy", prompt=[5], max_tokens=12, extra_body=OURS) for _ in range(4)]
    assert len({each.choices[0].text for each in found}) > 1


@pytest.mark.usefixtures("slow_passes")
def test_a_client_that_goes_cancels_its_request(client: openai.OpenAI, address: str, runtime: Runtime) -> None:
    def aborted() -> float:
        (count,) = re.findall(r'^vllm:request_success_total.*"abort".* (\S+)$', get(f"{address}/metrics")[1], re.M)
        return float(count)

    settle(runtime)
    known, before = aborted(), runtime.scheduler_stats
    own: dict[str, Any] = {"model": "toy", "prompt": [5], "max_tokens": 140, "temperature": 0}
    own["extra_body"] = OURS | {"drafter": "none"}
    stream = client.completions.create(stream=True, **own)
    next(iter(stream))
    stream.close()
    settle(runtime)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**own)
    settle(runtime)
    after = runtime.scheduler_stats
    assert after.finished - before.finished == 2
    assert after.new_tokens - before.new_tokens < 200
    wait_until(lambda: aborted() == known + 2)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"prompt": "x", "echo": True}, "echo is not served"),
        ({"prompt": "x", "extra_body": {"draft_tokens": 99}}, "draft_tokens is 99; pass a whole number from 1 to 11"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens is true; pass a whole number of at least 1"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": [""]}, r"prompt\[0\] is empty; pass a text of at least one character"),
        ({"prompt": ["x", 5]}, r"prompt\[1\] is 5; pass text, token ids"),
        ({"prompt": ["x"] * 9, "n": 8}, r"asks for 72 choices \(prompts: 9, n: 8\); at most 64 are allowed"),
        ({"prompt": [99999]}, "Token id 99999"),
        ({"prompt": [5] * 200}, "context is 160"),
        ({"prompt": "x", "extra_body": {"heat": 1}}, "^.*heat is no known key; leave it out"),
    ],
)
def test_completions_that_cannot_be_served_are_refused(client: openai.OpenAI, own: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.completions.create(model="toy", **own)
    assert caught.value.type == "invalid_request_error"
    assert (caught.value.code == "context_length_exceeded") == ("context" in words)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"messages": []}, "messages is .*; pass a list of at least one message"),
        ({"messages": [{"role": "critic", "content": "x"}]}, r'messages\[0\].role is "critic"; pass "system"'),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is missing; pass a text, or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            r'messages\[0\].content\[0\].type is "image_url"; pass "text", as other parts are not served',
        ),
        ({"top_logprobs": 2}, "top_logprobs is 2, and logprobs is not true; add logprobs"),
    ],
)
def test_chats_that_cannot_be_served_are_refused(client: openai.OpenAI, own: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(**{"model": "toy", "messages": [{"role": "user", "content": "x"}], **own})


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    model = client.models.retrieve("toy").model_dump()
    assert (model["owned_by"], model["max_model_len"], model["context_length"]) == ("outrider", 160, 160)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(branch_plan: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", Mock(side_effect=AssertionError("it was encoded")))
    text = "word " * 180_000
    with listening(Runtime.load(branch_plan, threads=1)) as address, client_of(address) as client:
        for ask in (
            lambda: client.completions.create(model="toy", prompt=text),
            lambda: client.chat.completions.create(model="toy", messages=[{"role": "user", "content": text}]),
            lambda: client.chat.completions.create(model="toy", messages=[{"role": "user", "content": ""}] * 160),
        ):
            with pytest.raises(openai.BadRequestError, match="the plan's context is 160") as caught:
                ask()
            assert caught.value.code == "context_length_exceeded"


def test_others_are_answered_while_a_prompt_is_encoded(client: openai.OpenAI, address: str, monkeypatch: Patch) -> None:
    begun, resume, encoded = threading.Event(), threading.Event(), list[str]()

    def wait(_: Tokenizer, text: str, **more: Any) -> None:
        encoded.append(text)
        begun.set()
        assert resume.wait(60)

    call_before(monkeypatch, Tokenizer, "encode", wait)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.completions.create, model="toy", prompt="import os", n=3, max_tokens=2)
        try:
            assert begun.wait(60)
            assert get(f"{address}/health") == (200, '{"status":"ok"}')
        finally:
            resume.set()
        assert len(asked.result(60).choices) == 3
    assert encoded == ["import os"]  # once for all its choices


@pytest.fixture
def slow_passes(monkeypatch: Patch) -> None:
    """150 tokens take 8 s, or longer."""
    call_before(monkeypatch, StepLoop, "step", lambda *_: time.sleep(0.05))


LONG: dict[str, Any] = {"max_new_tokens": 150, "drafter": "none", "ignore_eos": True}


@pytest.mark.usefixtures("slow_passes")
def test_a_key_has_a_share_of_the_queue(branch_plan: Path) -> None:
    config = SchedulerConfig(max_running=1, max_waiting=8, max_waiting_per_client=2)
    busy = Runtime.load(branch_plan, threads=1, scheduler=config)
    first = busy.submit([5], **LONG)
    next(iter(first))
    own: dict[str, Any] = {"model": "toy", "prompt": "x", "max_tokens": 1}
    with listening(busy, api_key=["one", "two"]) as address:
        with client_of(address, "one") as one, client_of(address, "two") as two, ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(one.completions.create, n=2, **own)]
            wait_until(lambda: busy.scheduler_stats.waiting == 2)
            with pytest.raises(openai.RateLimitError, match=r"of this client wait: 2 already, and its") as full:
                one.completions.create(**own)
            assert int(full.value.response.headers["retry-after"]) > 0
            waiting.append(pool.submit(two.completions.create, **own))
            wait_until(lambda: busy.scheduler_stats.waiting == 3)
            first.cancel()
            assert [len(each.result(60).choices) for each in waiting] == [2, 1]
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client_of(address, "three").models.list()
