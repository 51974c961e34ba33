"""The server's HTTP: bodies, paths, keys, origins, hosts, limits, their errors; slow, silent and too many clients."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.errors import RequestError
from outrider.runtime.__main__ import main
from outrider.runtime.server.command import bound_socket
from outrider.runtime.server.config import Limits, ServerConfig
from tests.integration.served import KEY, answers, client_of, connected, get, listening, serving, settle, wait_until
from tests.integration.served import sent as everything_said


@pytest.fixture(scope="module")
def address(branch_plan: Path) -> Iterator[str]:
    with listening(Runtime.load(branch_plan, threads=1), api_key=KEY, max_body_bytes=20_000) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address, KEY) as found:
        yield found


def asked(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; headers' names have `_` for `-`."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named, encode_chunked=isinstance(body, Iterator))
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "The body is not JSON: .* at character 2"),
        (b"[" * 15_000, "The body cannot be read as JSON: it is nested too deeply"),
        (b'"\xff"', "The body cannot be read as JSON: it is no UTF-8 text"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "it has a number of too many digits"),
        (b'{"model": "toy", "prompt": "x", "\\ud800": 1}', r"\\ud800 is no known key"),
        (b'{"model": "toy", "prompt": "x", "seed": "\\ud800"}', r'seed is "\\ud800"; pass a whole'),
        (b'{"model": "toy", "prompt": "x", "' + b"k" * 5000 + b'": 1}', "^k{60}[.]{3} is no known key"),
        (b"[]", r"The body is \[\]; send a JSON object"),
        (b"", "The body is empty"),
        (b'{"model": "toy"}', "prompt is missing; pass text, token ids, or a list of either"),
    ],
    ids=range(10),
)
def test_bodies_that_are_no_requests_are_refused(address: str, data: bytes, words: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    status, body = get(f"{address}/v1/completions", headers, data)
    assert status == 400
    assert re.search(words, json.loads(body)["error"]["message"])


def test_unknown_paths_models_and_types_of_bodies_are_named(address: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for path, data, words in (
        ("/v1/embeddings", b"{}", "There is nothing at /v1/embeddings; this server has /v1/completions"),
        ("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}', r"There is no model '\ud800' here; pass 'toy'."),
        ("/v1/completions", None, "/v1/completions cannot be asked by GET; use POST"),
    ):
        status, body = get(f"{address}{path}", headers, data)
        assert status in (404, 405)
        assert words in json.loads(body)["error"]["message"]
    status, body = get(f"{address}/v1/completions", headers | {"Content-Type": "text/plain"}, b"{}")
    assert (status, "header Content-Type: application/json" in body) == (400, True)


@pytest.mark.parametrize("shared", [False, True])
def test_no_key_learns_what_another_asked(branch_plan: Path, shared: bool) -> None:
    kept = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=4096))
    prompt = "import os\nimport sys\ndef main("
    with listening(kept, api_key=["one", "two"], share_prefixes=shared) as address:

        def cached(key: str, **own: Any) -> int:
            with client_of(address, key) as client:
                found = client.completions.create(model="toy", prompt=prompt, max_tokens=2, extra_body=own)
            settle(kept)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details is not None
            return found.usage.prompt_tokens_details.cached_tokens or 0

        assert cached("one") == 0
        assert cached("one") > 0
        for salt in ("a", "b"):
            stream = kept.stream_branches([5] * 40, [[1], [2]], max_new_tokens=2, cache_salt=salt)
            assert len(list(stream)) > 0
            assert (stream.stats.reused_tokens, stream.stats.cached_tokens) == (0, 0)
        assert (cached("two") > 0) is shared
        assert cached("two") > 0
        assert [cached("one", cache_salt=salt) > 0 for salt in "aba"] == [False, False, True]
        assert (cached("two", cache_salt="a") > 0) is shared


def test_heads_chunked_bodies_and_schemes_of_keys(address: str, client: openai.OpenAI) -> None:
    key = {"Authorization": f"bearer {KEY}"}
    for path in ("/health", "/health/live", "/health/ready", "/v1/models", "/v1/models/toy", "/metrics"):
        status, headers, body = asked(address, "HEAD", path, **key)
        assert (status, body) == (200, b"")
        assert int(headers["content-length"]) > 0
    own: dict[str, Any] = {"model": "toy", "prompt": "import os\n", "max_tokens": 4, "temperature": 0}
    text = json.dumps(own).encode()
    given = asked(
        address, "POST", "/v1/completions", iter([text[:9], text[9:]]), Content_Type="application/json", **key
    )
    assert given[0] == 200
    assert json.loads(given[2])["choices"][0]["text"] == client.completions.create(**own).choices[0].text
    for wrong in (KEY, f"Basic {KEY}", f"Bearer{KEY}"):
        assert asked(address, "GET", "/v1/models", Authorization=wrong)[0] == 401


@pytest.mark.parametrize(
    ("config", "origin", "may"),
    [
        ({}, "http://localhost:3000", True),
        ({}, "http://localhost.attacker.example", False),
        ({}, "https://chat.example", False),
        ({"allow_origins": ["https://chat.example"], "api_key": KEY}, "https://chat.example", True),
        ({"allow_origins": ["*"]}, "https://any.example", True),
    ],
)
def test_origins_of_pages(branch_plan: Path, config: dict[str, Any], origin: str, may: bool) -> None:
    with listening(Runtime.load(branch_plan, threads=1), **config) as address:
        wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
        status, headers, _ = asked(address, "OPTIONS", "/v1/chat/completions", Origin=origin, **wanted)
        assert (status == 200) is may
        assert (headers.get("access-control-allow-origin") in (origin, "*")) is may
        refused = asked(address, "GET", "/nowhere", Origin=origin, Authorization=f"Bearer {KEY}")
        assert refused[0] == 404
        assert (refused[1].get("access-control-allow-origin") in (origin, "*")) is may


def test_without_a_key_a_name_that_is_not_known_is_refused(branch_plan: Path) -> None:
    with listening(Runtime.load(branch_plan, threads=1), allow_hosts=["Box.example"]) as address:
        for host in ("localhost:80", "localhost.", "foo.localhost:1", "10.1.2.3", "[::1]:8000", "box.example:8000"):
            assert asked(address, "GET", "/v1/models", Host=host)[0] == 200
        for path in ("/v1/models", "/metrics"):
            for name in ("[", "notlocalhost", "localhost.attacker.example", "127.0.0.1.attacker.example"):
                assert asked(address, "GET", path, Host=name)[0] == 403
            status, _, body = asked(address, "GET", path, Host="attacker.example")
            assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed")
        assert asked(address, "GET", "/health/ready", Host="attacker.example")[0] == 200
    with listening(Runtime.load(branch_plan, threads=1), api_key=KEY, protect_metrics=True) as address:
        assert asked(address, "GET", "/metrics", Host="any.example")[0] == 401
        assert asked(address, "GET", "/metrics", Host="any.example", Authorization=f"Bearer {KEY}")[0] == 200
    with pytest.raises(RequestError, match="allow_hosts holds 'box:80'; pass a name alone"):
        ServerConfig("toy", allow_hosts=["box:80"])
    with pytest.raises(RequestError, match="protect_metrics is true, and there is no API key"):
        ServerConfig("toy", protect_metrics=True)


OURS: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def limited(branch_plan: Path) -> Iterator[str]:
    with listening(Runtime.load(branch_plan, threads=1), Limits(0.4, 0.4), api_key=KEY, max_body_bytes=2000) as found:
        yield found


HEAD = f"Host: x\r\nAuthorization: Bearer {KEY}\r\n"
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
        ("GET / HTTP/1.1\r\n\r\n", 400, "invalid_http", "Host"),
        (f"GET / HTTP/1.1\r\nX: {'x' * 100_000}", 431, "headers_too_large", "shorter headers"),
        ("GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", 404, "not_found", "this server has"),
        (f"DELETE /v1/models HTTP/1.1\r\n{HEAD}\r\n", 405, "method_not_allowed", "use GET"),
    ],
)
def test_each_limit_has_an_error_in_openais_shape(
    limited: str, sent: str, status: int, code: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(limited) as plain:
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


def test_a_malformed_request_after_an_answer_only_closes_the_connection(limited: str) -> None:
    with connected(limited) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        while b'{"status":"ok"}' not in plain.recv(4096):
            pass
        plain.sendall(b"}\r\n\r\n\x00nothing of HTTP\r\n\r\n")
        rest = b"".join(iter(lambda: plain.recv(4096), b""))
    assert rest == b"" or json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_ids_are_in_every_answer(limited: str) -> None:
    with client_of(limited, KEY) as client:
        own: dict[str, Any] = {"model": "toy", "prompt": "import", "max_tokens": 3}
        whole = client.completions.with_raw_response.create(**own, extra_headers={"x-request-id": "mine-1"})
        assert whole.headers["x-request-id"] == "mine-1"
        with client.completions.with_streaming_response.create(**own, stream=True) as streamed:
            assert streamed.headers["x-request-id"].startswith("req_")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**own | {"n": 0}, extra_headers={"x-request-id": "mine-2"})
        assert refused.value.request_id == "mine-2"


def test_a_key_has_a_budget_of_tokens(branch_plan: Path) -> None:
    """The buckets themselves are tested in `test_server_parts.py`."""
    runtime = Runtime.load(branch_plan, threads=1)
    with (
        listening(runtime, api_key=["one", "two"], tokens_per_minute=600) as address,
        client_of(address, "one") as one,
        client_of(address, "two") as two,
    ):
        own: dict[str, Any] = {"model": "toy", "prompt": [5] * 10}

        def left(client: openai.OpenAI, **asked: Any) -> int:
            answer = client.completions.with_raw_response.create(**own, **asked)
            return int(answer.headers["x-ratelimit-remaining-tokens"])

        assert left(one, max_tokens=140, n=3, extra_body=OURS) == 600 - 10 - 3 * 140
        with pytest.raises(openai.RateLimitError, match=r"may take 570 tokens .* of its 600 a minute") as no:
            one.completions.create(max_tokens=140, n=4, **own)
        remaining = int(no.value.response.headers["x-ratelimit-remaining-tokens"])
        assert 170 <= remaining < 500
        # OpenAI's client waits as it is asked to, and is served then: 15 tokens come in 1.5 s.
        each = -(-(remaining + 15 - 10) // 4)
        found = one.with_options(max_retries=4).completions.create(max_tokens=each, n=4, extra_body=OURS, **own)
        assert found.usage is not None
        assert found.usage.completion_tokens == 4 * each
        # Tokens that a request does not use come back, also where it fails, or its client goes.
        assert left(two, max_tokens=1) == 600 - 11
        two.completions.create(max_tokens=140, n=4, extra_body={"deadline": 1e-6}, **own)
        with pytest.raises(openai.BadRequestError, match="allowed_token_ids"):
            two.completions.create(max_tokens=140, n=4, extra_body={"allowed_token_ids": []}, **own)
        assert left(two, max_tokens=1) > 500
        with two.completions.create(max_tokens=140, n=3, extra_body=OURS, stream=True, **own) as stream:
            next(iter(stream))
        settle(runtime)
        wait_until(lambda: left(two, max_tokens=1) > 300, 10)


def test_a_budget_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--tokens-per-minute", "5", "--port", "0"]) == 2
    assert "--tokens-per-minute is a budget of each API key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ("", b""),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n", b"The request's head has not come within 0.3 s"),
        (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n{{",
            b"The request's body has not come within 0.4 s",
        ),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{", b'{"status":"ok"}'),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b'{"status":"ok"}'),
    ],
    ids=["nothing", "half a head", "half a body", "an answer before the body", "half a second head"],
)
def test_connections_that_wait_are_closed(impatient: str, sent: str, answered: bytes) -> None:
    found = everything_said(impatient, sent.encode())
    assert found.endswith(answered) if answered.startswith(b"{") else answered in found
    assert found.startswith(b"HTTP/1.1 ") == bool(answered)
    assert (b" 408 " in found) == (b"has not come" in answered)
    assert get(f"{impatient}/health") == (200, '{"status":"ok"}')


def test_a_head_that_trickles_in_is_not_waited_for(impatient: str) -> None:
    with connected(impatient, 0.05) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(400):
            with suppress(TimeoutError):
                assert b" 408 " in plain.recv(4096)
                return
            plain.sendall(b"x")
    raise AssertionError("it was waited for")


@pytest.fixture(scope="module")
def impatient(branch_plan: Path) -> Iterator[str]:
    with listening(Runtime.load(branch_plan, threads=1), Limits(0.3, 0.4, idle_seconds=0.2), api_key=KEY) as address:
        yield address


def test_too_many_connections_are_refused(branch_plan: Path) -> None:
    with listening(Runtime.load(branch_plan, threads=1), Limits(max_connections=2)) as address:
        with connected(address), connected(address):
            status, body = get(f"{address}/health")
            error = json.loads(body)["error"]
            assert (status, error["type"], error["code"]) == (503, "rate_limit_error", "too_many_connections")
            assert get(f"{address}/health/live")[0] == get(f"{address}/metrics")[0] == 200
            assert error["message"].startswith("Too many connections are open, and this server takes 2; close idle")
        wait_until(lambda: answers(f"{address}/health"))


@contextmanager
def small_buffers(bound: socket.socket) -> Iterator[socket.socket]:
    """A client of a server that has data waiting soon."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(60)
        client.connect(bound.getsockname())
        yield client


def test_a_client_that_reads_nothing_is_disconnected(branch_plan: Path) -> None:
    bound = bound_socket("127.0.0.1", 0)
    asked = {"model": "toy", "prompt": [5], "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 5}
    body = json.dumps(asked | {"n": 16}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    limits = Limits(send_seconds=0.3)
    with serving(Runtime.load(branch_plan, threads=1), bound, limits) as server, small_buffers(bound) as deaf:
        deaf.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_until(lambda: bool(server.server_state.connections))
        wait_until(lambda: not server.server_state.connections)
        with suppress(ConnectionResetError):
            read = b"".join(iter(lambda: deaf.recv(4096), b""))
            assert read.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" not in read


def test_a_client_that_reads_slowly_has_all_of_its_answer(branch_plan: Path) -> None:
    bound = bound_socket("127.0.0.1", 0)
    limits = Limits(send_seconds=0.5)  # reading takes longer than that
    with serving(Runtime.load(branch_plan, threads=1), bound, limits), small_buffers(bound) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        read = b""
        while piece := slow.recv(500):
            read += piece
            time.sleep(0.025)
        length = int(re.search(rb"content-length: (\d+)", read)[1])  # type: ignore[index]
        assert len(read.partition(b"\r\n\r\n")[2]) == length > 500 * 20


def test_more_connections_than_open_files(branch_plan: Path) -> None:
    command = [sys.executable, "-m", "outrider.runtime", "serve", str(branch_plan), "--threads", "1", "--port", "0"]
    limited = ["bash", "-c", 'ulimit -n 200 && exec "$@"', "bash", *command, "--head-seconds", "2"]
    with subprocess.Popen(limited, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        first = "".join(server.stderr.readline() for _ in range(3))
        address = re.search(r"http://127\.0\.0\.1:(\d+)", first)
        assert address is not None, first
        try:
            silent = [connected(address[0]) for _ in range(300)]
            wait_until(lambda: answers(f"{address[0]}/health"))
            for client in silent:
                client.close()
            server.send_signal(signal.SIGTERM)
            _, later = server.communicate(timeout=60)
        finally:
            server.kill()  # nothing to one that has ended
        assert (server.returncode, later) == (0, "")
    assert "at most 56 connections at once" in first


def test_an_upgrade_is_not_begun(impatient: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = urllib.request.Request(f"{impatient}/health", headers={"Connection": "Upgrade", "Upgrade": "websocket"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.status == 200
    assert not caplog.records
