"""`outrider serve` as a command, from its options to its end; and the end of a request whose task is cancelled."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from starlette.types import ASGIApp, Message

from outrider import PrefixCacheConfig, Runtime
from outrider.plans.errors import ClosedError, PlanError
from outrider.runtime.__main__ import main
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.server.app import make_app
from outrider.runtime.server.config import ServerConfig
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.service import recall
from outrider.runtime.server.submitting import Submitter
from tests.integration.served import KEY, ServerProcess, client_of, get, server_process, settle, wait_until

Captured = pytest.CaptureFixture[str]
LONG: dict[str, Any] = {
    "model": "toy", "prompt": [5], "max_tokens": 140, "temperature": 0, "ignore_eos": True, "drafter": "none"
}  # fmt: skip


def streaming(server: ServerProcess) -> Callable[[], list[Any]]:
    """Begin a long stream; returns a function that reads the rest of it, and returns all its events."""
    asked = json.dumps(LONG | {"stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{server.address}/v1/completions", asked, headers))
    begun = answer.readline()

    def rest() -> list[Any]:
        with answer:
            body = (begun + answer.read()).decode()
        *events, done = (event.removeprefix("data: ") for event in body.removesuffix("\n\n").split("\n\n"))
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    return rest


def connected(server: ServerProcess) -> HTTPConnection:
    """A connection on which nothing has been sent."""
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=60)
    connection.connect()
    return connection


def ready(connection: HTTPConnection) -> int:
    """The status of `/health/ready` on a connection, which is kept."""
    connection.request("GET", "/health/ready")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def sent_in_part(server: ServerProcess) -> socket.socket:
    """A connection on which a request has been sent but for the last byte of its body."""
    body = json.dumps(LONG | {"max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection = connected(server).sock
    connection.sendall(f"{head}Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n".encode())
    assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")  # so that the server has begun with it
    connection.sendall(body[:-1])
    return connection


def test_nothing_comes_after_draining() -> None:
    readiness = Readiness(Phase.LOADING)
    for phase, status in ((Phase.WARMING, 503), (Phase.READY, 200), (Phase.DRAINING, 503)):
        readiness.reach(phase)
        assert (readiness.response[0], readiness.response[1]["status"]) == (status, phase.name.lower())
    readiness.reach(Phase.READY)
    assert readiness.response[1]["status"] == "draining"


def test_a_server_answers_probes_while_it_loads_and_while_it_drains(branch_plan: Path, tmp_path: Path) -> None:
    """Running and queued requests are finished after SIGTERM, new ones refused; then the process ends with 0."""
    loadable = tmp_path / "loadable"
    with server_process(branch_plan, "--max-running", "1", pass_seconds=0.05, load_after=loadable) as server:
        assert server.get("/health/live") == (200, {"status": "live"})
        assert server.get("/health/ready")[1]["status"] == "loading"
        assert server.get("/health")[0] == 503
        with client_of(server.address) as client, pytest.raises(openai.InternalServerError) as early:
            client.completions.create(model="toy", prompt="x")
        assert (early.value.status_code, early.value.code) == (503, "loading")
        assert early.value.response.headers["retry-after"] == "5"
        loadable.touch()
        wait_until(server.ready)
        assert server.get("/health") == (200, {"status": "ok"})

        with ThreadPoolExecutor(2) as pool:
            rest = streaming(server)
            queued = pool.submit(server.get, "/v1/completions", **LONG | {"max_tokens": 5})
            with client_of(server.address) as client:  # with no connection yet that the server may close
                silent, idle = connected(server), connected(server)
                assert ready(idle) == 200
                half = sent_in_part(server)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.get("/health/ready")[1]["status"] == "draining")
                with pytest.raises(openai.InternalServerError) as late:
                    client.completions.create(model="toy", prompt="x")
                with closing(idle), closing(silent):
                    assert idle.sock.recv(1) == b""  # closed, as all connections that idle after an answer
                    assert ready(silent) == 503  # its first request, which could have been on its way
            assert (late.value.status_code, late.value.code) == (503, "shutting_down")
            headers = late.value.response.headers
            assert (headers["retry-after"], headers["connection"]) == ("5", "close")
            assert server.get("/health/live") == (200, {"status": "live"})
            half.sendall(b"}")  # the rest of a body whose request had come before
            events = rest()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert sum(bool(event["choices"][0]["text"]) for event in events) > 100
            assert queued.result(60)[1]["usage"]["completion_tokens"] == 5
            with half:
                assert half.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("drain_seconds", "signals"),
    [pytest.param("0.5", 1, id="time is up", marks=pytest.mark.long), pytest.param("60", 2, id="second SIGTERM")],
)
def test_answers_are_cut_off_with_an_error(branch_plan: Path, drain_seconds: str, signals: int) -> None:
    arguments = ("--max-running", "2", "--drain-seconds", drain_seconds)
    with server_process(branch_plan, *arguments, pass_seconds=0.2) as server:
        wait_until(server.ready)
        with ThreadPoolExecutor(2) as pool:
            rest = streaming(server)
            whole = [pool.submit(server.get, "/v1/completions", **LONG) for _ in range(2)]
            wait_until(lambda: metric(server, "requests_waiting") == 1 and metric(server, "new_tokens_total") >= 12)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: not server.ready())  # two at once would be one
            *_, last, error = rest()
            answers = [each.result(60) for each in whole]
            assert server.process.wait(60) == 0
            assert "Traceback" not in server.said
    assert (last["choices"][0]["finish_reason"], error["error"]["code"]) == ("length", "shutting_down")
    assert [(status, body["error"]["code"]) for status, body in answers] == [(503, "shutting_down")] * 2
    said = sorted(body["error"]["message"] for _, body in answers)
    assert "cut off after 0 tokens" in said[0]
    assert re.search("cut off after [1-9][0-9]* tokens", said[1])


def metric(server: ServerProcess, name: str) -> float:
    text = get(f"{server.address}/metrics")[1]
    (line,) = (line for line in text.splitlines() if line.startswith(f"outrider_{name} "))
    return float(line.split()[1])


class Elsewhere:
    """The methods of `ServedRuntime` alone, without a prefix cache."""

    prefix_cache = None
    scheduler_stats = SchedulerStats(waiting=3, running=2, kv_slots=100, kv_used=25)

    def __init__(self, runtime: Runtime) -> None:
        for name in ("tokenizer", "grammars", "manifest", "submit_all", "save_prefix_cache", "close"):
            setattr(self, name, getattr(runtime, name))


def test_the_application_serves_any_served_runtime_in_any_server(branch_plan: Path) -> None:
    runtime = Runtime.load(branch_plan, threads=1)
    readiness = Readiness()
    app = make_app(Elsewhere(runtime), ServerConfig("toy", api_key="k", tokens_per_minute=1000), readiness=readiness)
    with TestClient(app) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        headers = {"Authorization": "Bearer k", "x-request-id": "mine"}
        answer = client.post("/v1/completions", json=LONG | {"max_tokens": 3}, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (answer.headers["x-request-id"], answer.headers["x-ratelimit-limit-tokens"]) == ("mine", "1000")
        text = client.get("/metrics").text
        for name, number in (("num_requests_waiting", 3.0), ("kv_cache_usage_perc", 0.25)):
            assert f'vllm:{name}{{engine="0",model_name="toy"}} {number}' in text
        assert "vllm:cache_config_info" not in text
    assert readiness.draining
    with pytest.raises(ClosedError):
        runtime.submit([5])


def test_sigterm_while_the_plan_is_loaded_ends_the_server(branch_plan: Path, tmp_path: Path) -> None:
    with server_process(branch_plan, load_after=tmp_path / "never") as server:
        assert server.get("/health/ready")[0] == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_the_command_serves_until_sigterm_and_keeps_its_cache(branch_plan: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for start in range(2):
        options = ("--cache-file", str(kept), "--cache-tokens", "4096", "--drain-seconds", "2")
        with server_process(branch_plan, *options) as server:
            wait_until(server.ready)
            with client_of(server.address) as client:
                found: Any = client.completions.create(model="toy", prompt=[7, 8, 9] * 10, max_tokens=3)
            assert found.usage.prompt_tokens_details.cached_tokens == (29 if start else 0)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            assert kept.exists()
            assert "serving 'toy'" in server.said
            assert ("are warm" in server.said) == bool(start)


def test_a_prefix_cache_of_another_plan_is_ignored(toy_plan: Path, branch_plan: Path, tmp_path: Path) -> None:
    kept, none = tmp_path / "kept", tmp_path / "none"
    old, new = (Runtime.load(plan, threads=1, prefix_cache=PrefixCacheConfig()) for plan in (toy_plan, branch_plan))
    old.generate([7, 8, 9] * 10, max_new_tokens=3)
    assert old.save_prefix_cache(kept) > 0
    assert "tokens of earlier prompts are warm" in recall(old, kept)
    assert re.match("warning: no earlier prompts are warm.* was saved with another plan", recall(new, kept))
    none.write_text("not to be lost")
    with pytest.raises(PlanError, match="no prefix cache"):
        recall(new, none)


def test_wrong_options_are_refused_before_the_plan_is_loaded(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    empty, latin = tmp_path / "empty", tmp_path / "latin"
    empty.write_text("# none\n\n")
    latin.write_text("schl\u00fcssel\n", encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option, value, words in (
            ("--port", str(port), f"listens at port {port} of 127.0.0.1 already; pass another --port"),
            ("--host", "", "--host is empty"),
            ("--host", "no.such.host.invalid", "no address that this machine can look up"),
            ("--host", "a" * 70, "no address that this machine can look up"),
            ("--host", "192.0.2.1", "no address of this machine"),
            ("--cache-file", "no/where/kept", "there is no folder no/where"),
            ("--max-connections", str(2**40), "open files, and this process may open"),
            ("--max-waiting-per-key", "5", "shares the queue among API keys; pass --api-key too, or leave it out"),
            ("--api-key", "", "An API key is empty"),
            ("--api-key-file", str(tmp_path / "none"), f"The file of API keys {tmp_path / 'none'} cannot be read"),
            ("--api-key-file", str(empty), "holds no key; write one a line"),
            ("--api-key-file", str(latin), "characters that a header cannot hold"),
        ):
            more = [] if option == "--port" else ["--port", "0"]
            assert main(["serve", str(tmp_path / "no plan"), option, value, *more]) == 2, option
            assert words in capsys.readouterr().err
    for more, words in (["--cache-file", "x", "--no-prefix-cache"], "of the prefix cache"), ([], "is not a plan"):
        assert main(["serve", str(tmp_path / "no plan"), "--port", "0", *more]) == 2
        assert words in capsys.readouterr().err


BUDGET = 2000


async def ask(app: ASGIApp, **asked: Any) -> dict[str, str]:
    """Send a completion's body to the application itself, in this task; the headers of the answer."""
    body = json.dumps({"model": "toy", "prompt": [5], "ignore_eos": True, **asked}).encode()
    given = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "content-length": str(len(body))}
    found: dict[str, str] = {}
    coming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not coming:
            await asyncio.sleep(60)
        return coming.pop()

    async def send(message: Message) -> None:
        found.update({name.decode(): value.decode() for name, value in message.get("headers", ())})

    headers = [(name.encode(), value.encode()) for name, value in given.items()]
    where = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    await app(where | {"headers": headers}, receive, send)
    return found


def test_a_request_that_is_cancelled_while_a_thread_prepares_it_ends_and_gives_its_tokens_back(
    branch_plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled, ready = threading.Event(), threading.Event(), threading.Event()
    original = Submitter.submit

    def slowly(self: Submitter, *arguments: Any) -> Any:
        begun.set()
        assert cancelled.wait(60)
        submitted = original(self, *arguments)
        ready.set()
        return submitted

    async def use(runtime: Runtime) -> int:
        app = make_app(runtime, ServerConfig("toy", api_key=KEY, tokens_per_minute=BUDGET))
        with monkeypatch.context() as patched:
            patched.setattr(Submitter, "submit", slowly)
            asking = asyncio.create_task(ask(app, max_tokens=140))
            assert await asyncio.to_thread(begun.wait, 60)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            cancelled.set()
            assert await asyncio.to_thread(ready.wait, 60)
        await asyncio.to_thread(settle, runtime)
        await asyncio.sleep(0.2)  # the event loop hears of it
        return int((await ask(app, max_tokens=1))["x-ratelimit-remaining-tokens"])

    runtime = Runtime.load(branch_plan, threads=1)
    try:
        runtime.start()
        remaining = asyncio.run(use(runtime))
        made = runtime.scheduler_stats.new_tokens
    finally:
        runtime.close(drain=False, timeout=60)
    assert made < 140
    assert remaining >= BUDGET - 3 - made  # the prompts are a token each, and the second answer
