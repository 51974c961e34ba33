"""The server, used by OpenAI's own client over loopback."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from runtime import PrefixCacheConfig, Runtime, SchedulerConfig
from runtime.__main__ import main
from runtime.branch_run import BranchRunner
from runtime.server.app import ServerConfig, make_app

KEY = "a key"


@contextmanager
def listening(runtime: Runtime, **config: Any) -> Iterator[str]:
    """A server of its own for a while; its address."""
    runtime.start()
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    app = make_app(runtime, ServerConfig("toy", drain_seconds=5, **config))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


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
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as found:
        yield found


def settle(runtime: Runtime) -> None:
    """Wait until nothing runs."""
    until = time.monotonic() + 20
    while runtime.scheduler_stats.running or runtime.scheduler_stats.waiting:
        assert time.monotonic() < until
        time.sleep(0.01)


def get(url: str, headers: dict[str, str] | None = None, data: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {})) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_completion_is_what_the_runtime_generates(client: openai.OpenAI, alone: Runtime) -> None:
    expected = alone.generate("import os\n", max_new_tokens=12, temperature=0.7, seed=5, ignore_eos=True)
    found = client.completions.create(
        model="toy", prompt="import os\n", max_tokens=12, temperature=0.7, seed=5, extra_body={"ignore_eos": True}
    )
    (choice,) = found.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert found.object == "text_completion"
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    assert found.usage.completion_tokens == 12
    assert found.usage.total_tokens == found.usage.prompt_tokens + 12


@pytest.mark.parametrize("drafter", ["none", "ngram", "bushy", "head"])
def test_a_stream_is_the_same_in_pieces(client: openai.OpenAI, alone: Runtime, drafter: str) -> None:
    expected = alone.generate([5, 6, 7], max_new_tokens=20, ignore_eos=True)
    more = {"ignore_eos": True, "drafter": drafter}
    events = list(
        client.completions.create(
            model="toy",
            prompt=[5, 6, 7],
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=more,
        )
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == expected.text
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    assert len({event.id for event in events}) == 1


def test_several_prompts_and_choices(client: openai.OpenAI, alone: Runtime) -> None:
    prompts = ["import os", "def main"]
    found = client.completions.create(
        model="toy", prompt=prompts, max_tokens=6, temperature=1.0, seed=3, n=2, extra_body={"ignore_eos": True}
    )
    expected = [
        alone.generate(prompt, max_new_tokens=6, temperature=1.0, seed=3, stream_id=choice, ignore_eos=True)
        for prompt in prompts
        for choice in range(2)
    ]
    assert [(choice.index, choice.text) for choice in found.choices] == [(i, e.text) for i, e in enumerate(expected)]
    assert found.usage is not None
    assert found.usage.prompt_tokens == sum(each.stats.prompt_tokens for each in expected[::2])
    assert found.usage.completion_tokens == 24


def test_log_probabilities(client: openai.OpenAI, alone: Runtime) -> None:
    expected = alone.generate([5, 6], max_new_tokens=5, logprobs=2, ignore_eos=True)
    own: dict[str, Any] = {"model": "toy", "max_tokens": 5, "temperature": 0, "extra_body": {"ignore_eos": True}}
    found = client.completions.create(prompt=[5, 6], logprobs=2, **own).choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs])
    assert found.top_logprobs is not None
    assert all(len(top) <= 2 for top in found.top_logprobs)
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **own)  # type: ignore[call-overload]
    content = chat.choices[0].logprobs.content
    assert len(content) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in content)


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
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(stream=True, **own))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    again = client.chat.completions.create(**own)
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.choices[0].message.content == expected.text


def test_stops_are_not_part_of_the_text(client: openai.OpenAI, alone: Runtime) -> None:
    whole = alone.generate([5, 6], max_new_tokens=30, ignore_eos=True).text
    stop = next(character for character in whole[1:] if character.isprintable() and character != "\ufffd")
    found = client.completions.create(
        model="toy", prompt=[5, 6], max_tokens=30, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"


def test_without_a_seed_samples_differ(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="toy", prompt=[5], max_tokens=12, extra_body={"ignore_eos": True})
        .choices[0]
        .text
        for _ in range(4)
    }
    assert len(texts) > 1


def test_a_client_that_goes_cancels_its_request(
    client: openai.OpenAI, runtime: Runtime, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = BranchRunner.advance

    def slowly(self: BranchRunner, *arguments: Any) -> Any:
        time.sleep(0.05)
        return original(self, *arguments)

    monkeypatch.setattr(BranchRunner, "advance", slowly)
    settle(runtime)
    before = runtime.scheduler_stats
    own: dict[str, Any] = {"model": "toy", "prompt": [5], "max_tokens": 140, "temperature": 0}
    stream = client.completions.create(stream=True, extra_body={"ignore_eos": True, "drafter": "none"}, **own)
    next(iter(stream))
    stream.close()
    began = time.monotonic()
    settle(runtime)
    assert time.monotonic() - began < 4  # 140 passes would take 7 s
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(extra_body={"ignore_eos": True, "drafter": "none"}, **own)
    began = time.monotonic()
    settle(runtime)
    assert time.monotonic() - began < 4
    after = runtime.scheduler_stats
    assert after.finished - before.finished == 2
    assert after.new_tokens - before.new_tokens < 200


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"prompt": "x", "echo": True}, "echo is not served"),
        ({"prompt": "x", "presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "n": 99}, "n: "),
        ({"prompt": []}, "1 to 64"),
        ({"prompt": ["x", ""]}, "none of them empty"),
        ({"prompt": [99999]}, "Token id 99999"),
        ({"prompt": [5] * 200}, "context is 160"),
        ({"prompt": "x", "extra_body": {"heat": 1}}, "heat"),
        ({"prompt": "x", "extra_body": {"drafter": "oracle"}}, "oracle"),
    ],
)
def test_what_cannot_be_served_is_said(client: openai.OpenAI, own: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.completions.create(model="toy", **own)
    assert caught.value.type == "invalid_request_error"
    assert (caught.value.code == "context_length_exceeded") == ("context" in words)


def test_models_keys_and_limits(client: openai.OpenAI, address: str) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "outrider"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.APIStatusError, match="at most 20000"):
        client.completions.create(model="toy", prompt="x" * 30_000)
    status, body = get(f"{address}/v1/completions", {"Authorization": f"Bearer {KEY}"}, b"{")
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")


def test_health_and_metrics(client: openai.OpenAI, address: str, runtime: Runtime) -> None:
    client.completions.create(model="toy", prompt="import os", max_tokens=3)
    assert get(f"{address}/health") == (200, '{"status":"ok"}')
    status, text = get(f"{address}/metrics")
    assert status == 200
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    stats = runtime.scheduler_stats
    assert float(figures["outrider_requests_submitted_total"]) == stats.submitted
    assert float(figures["outrider_step_seconds_count"]) == stats.rounds
    assert float(figures["outrider_new_tokens_total"]) == stats.new_tokens
    assert float(figures["outrider_cache_hits_total"]) > 0
    assert float(figures["outrider_time_to_first_token_seconds_count"]) > 0


def test_a_full_queue_is_told(branch_plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Runtime.load(branch_plan, threads=1, scheduler=SchedulerConfig(max_running=1, max_waiting=1))
    original = BranchRunner.advance

    def slowly(self: BranchRunner, *arguments: Any) -> Any:
        time.sleep(0.05)
        return original(self, *arguments)

    monkeypatch.setattr(BranchRunner, "advance", slowly)
    handles = [busy.submit([5], max_new_tokens=150, drafter="none", ignore_eos=True)]
    next(iter(handles[0]))
    with listening(busy) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        stuck = busy.submit([6], max_new_tokens=1)
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            client.completions.create(model="toy", prompt="x")
        handles[0].cancel()
        stuck.result(60)
    with pytest.raises(Exception, match="closed"):
        busy.submit([5])


def test_a_plan_of_one_branch_is_refused(toy_plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(toy_plan)]) == 2
    assert "capacity.branches" in capsys.readouterr().err
    assert main(["serve", str(toy_plan), "--cache-file", "x", "--no-prefix-cache"]) == 2
    assert "--cache-file is of the prefix cache" in capsys.readouterr().err
    assert main(["serve", str(toy_plan), "--cache-file", "no/where/kept"]) == 2  # before the server has run for days
    assert "there is no folder no/where" in capsys.readouterr().err


def test_the_command_serves_until_it_is_told_to_end_and_keeps_its_cache(branch_plan: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = tmp_path / "kept"
    command = [sys.executable, "-m", "runtime", "serve", str(branch_plan), "--port", str(port), "--threads", "1"]
    command += ["--cache-file", str(kept), "--cache-tokens", "4096", "--model-name", "toy", "--drain-seconds", "2"]
    for start in range(2):
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            until = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    assert get(f"http://127.0.0.1:{port}/health")[0] == 200
                    break
                assert time.monotonic() < until
                time.sleep(0.05)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0) as client:
                found = client.completions.create(model="toy", prompt=[7, 8, 9] * 10, max_tokens=3)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            assert found.usage.prompt_tokens_details.cached_tokens == (29 if start else 0)
        finally:
            server.send_signal(signal.SIGTERM)
            _, said = server.communicate(timeout=30)
        assert kept.exists()
        assert "serving 'toy'" in said
        assert ("are warm" in said) == bool(start)


def test_bodies_without_a_length_are_refused(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        plain.sendall(f"{head}Content-Length: 10\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        assert b" 4" in plain.recv(200)
    status, body = get(f"{address}/v1/completions", {"Authorization": f"Bearer {KEY}"}, b"[" * 15_000)
    assert status == 400
    assert "error" in json.loads(body)
