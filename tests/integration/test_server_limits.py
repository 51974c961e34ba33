"""Limits of the server: each is told in OpenAI's shape, with a code, what to do, and the request's id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider import Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.__main__ import main
from outrider.runtime.server.app import ServerConfig
from outrider.runtime.server.connections import Limits
from tests.integration.served import KEY, client_of, connected, listening, settle, wait_until

OURS: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def address(branch_plan: Path) -> Iterator[str]:
    with listening(Runtime.load(branch_plan, threads=1), Limits(0.4, 0.4), api_key=KEY, max_body_bytes=2000) as found:
        yield found


AUTHORISED = f"Authorization: Bearer {KEY}\r\n"


HEAD = f"Host: x\r\n{AUTHORISED}"
POST, CHUNKED = f"POST /v1/completions HTTP/1.1\r\n{HEAD}", "Transfer-Encoding: chunked\r\n"
JSON = f"Content-Type: application/json\r\n{CHUNKED}"


@pytest.mark.parametrize(
    ("sent", "status", "code", "advice"),
    [
        ("GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 401, "invalid_api_key", "Bearer KEY"),
        (f"{POST}Content-Length: 2001\r\n\r\n", 413, "body_too_large", "Send less text"),
        (f"{POST}\r\n", 411, "length_required", "send Content-Length"),
        (f"{POST}{JSON}\r\n800\r\n{' ' * 2048}\r\n0\r\n\r\n", 413, "body_too_large", "Send less text"),
        (f"{POST}Content-Length: 9\r\n{CHUNKED}\r\n0\r\n\r\n", 400, "invalid_http", "says its length twice"),
        (f"{POST}{CHUNKED}\r\nzz\r\n", 400, "invalid_http", ""),
        ("GET /v1/models HT", 408, "request_timeout", "send the request again"),
        ("hello\r\n\r\n", 400, "invalid_http", "Send a request line"),
        ("GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400, "invalid_http", ""),
        ("GET / HTTP/1.1\r\n\r\n", 400, "invalid_http", "Host"),
        (f"GET / HTTP/1.1\r\nX: {'x' * 100_000}", 431, "headers_too_large", "shorter headers"),
        ("GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404, "not_found", "this server has"),
        (f"DELETE /v1/models HTTP/1.1\r\n{HEAD}\r\n", 405, "method_not_allowed", "use GET"),
    ],
)
def test_each_limit_is_told_in_openais_shape(
    address: str, sent: str, status: int, code: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(address) as plain:
        plain.sendall(sent.encode())
        found = b""
        while not (b"\r\n\r\n" in found and found.endswith(b"}")):
            found += plain.recv(4096)
    head, _, body = found.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].split()[1] == str(status)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("authentication_error" if status == 401 else "invalid_request_error")
    assert error["code"] == code
    assert advice in error["message"]
    assert any(line.startswith("x-request-id: req_") for line in lines)
    assert "content-type: application/json" in lines
    assert not [record for record in caplog.records if record.exc_info]


def test_a_malformed_request_behind_an_answer_only_closes_the_connection(address: str) -> None:
    with connected(address) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        while b'{"status":"ok"}' not in plain.recv(4096):
            pass
        plain.sendall(b"}\r\n\r\n\x00nothing of HTTP\r\n\r\n")
        rest = b"".join(iter(lambda: plain.recv(4096), b""))
    assert rest == b"" or json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_ids_are_in_every_answer(address: str) -> None:
    with client_of(address, KEY) as client:
        own: dict[str, Any] = {"model": "toy", "prompt": "import", "max_tokens": 3}
        whole = client.completions.with_raw_response.create(**own, extra_headers={"x-request-id": "mine-1"})
        assert whole.headers["x-request-id"] == "mine-1"
        with client.completions.with_streaming_response.create(**own, stream=True) as streamed:
            assert streamed.headers["x-request-id"].startswith("req_")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**own | {"n": 0}, extra_headers={"x-request-id": "mine-2"})
        assert refused.value.request_id == "mine-2"


def test_a_key_has_a_budget_of_tokens(branch_plan: Path) -> None:
    with (
        listening(Runtime.load(branch_plan, threads=1), api_key=["one", "two"], tokens_per_minute=600) as address,
        client_of(address, "one") as one,
        client_of(address, "two") as two,
    ):
        own: dict[str, Any] = {"model": "toy", "extra_body": OURS}

        def left(client: openai.OpenAI, **asked: Any) -> int:
            answer = client.completions.with_raw_response.create(**own, **asked)
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert left(one, prompt=[5] * 10, max_tokens=140, n=3) == 600 - 10 - 3 * 140
        with pytest.raises(
            openai.RateLimitError, match=r"may take 570 tokens .* of its 600 a minute the key has"
        ) as no:
            one.completions.create(prompt=[5] * 10, max_tokens=140, n=4, **own)
        assert (no.value.code, no.value.type) == ("rate_limit_exceeded", "tokens")
        remaining = int(no.value.response.headers["x-ratelimit-remaining-tokens"])
        assert 170 <= remaining < 500
        # OpenAI's client waits as long as it is told, and is served then: 15 tokens come in 1.5 s.
        each = -(-(remaining + 15 - 10) // 4)
        found = one.with_options(max_retries=4).completions.create(prompt=[5] * 10, max_tokens=each, n=4, **own)
        assert found.usage is not None
        assert found.usage.completion_tokens == 4 * each
        # What a request does not use comes back.
        assert left(two, prompt=[5] * 10, max_tokens=1) == 600 - 11
        two.completions.create(model="toy", prompt=[5] * 10, max_tokens=140, n=4, extra_body={"deadline": 1e-6})
        assert left(two, prompt=[5] * 10, max_tokens=1) > 500


@pytest.mark.parametrize("gone", [False, True], ids=["an error", "a client that goes"])
def test_a_request_that_fails_gives_its_tokens_back(branch_plan: Path, gone: bool) -> None:
    runtime = Runtime.load(branch_plan, threads=1)
    with listening(runtime, api_key=KEY, tokens_per_minute=600) as address, client_of(address, KEY) as client:
        own: dict[str, Any] = {"model": "toy", "prompt": [5] * 10, "max_tokens": 140, "n": 4}
        if gone:
            with client.completions.create(stream=True, extra_body=OURS, **own) as stream:
                next(iter(stream))
        else:
            with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
                client.completions.create(extra_body={"allowed_token_ids": []}, **own)
        settle(runtime)
        asked: dict[str, Any] = {"model": "toy", "prompt": [5], "max_tokens": 1}

        def left() -> int:
            headers = client.completions.with_raw_response.create(**asked).headers
            return int(headers["x-ratelimit-remaining-tokens"])

        wait_until(lambda: left() > 400, 10)


def test_a_budget_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="tokens_per_minute is a budget of each API key"):
        ServerConfig("toy", tokens_per_minute=5)
    with pytest.raises(RequestError, match="tokens_per_minute is 0"):
        ServerConfig("toy", api_key=KEY, tokens_per_minute=0)
    assert main(["serve", str(tmp_path), "--tokens-per-minute", "5", "--port", "0"]) == 2
    assert "--tokens-per-minute is a budget of each API key" in capsys.readouterr().err
