"""A server process from its start to its end: probes while the plan is loaded, and what SIGTERM does to whom."""

from __future__ import annotations

import json
import re
import signal
import socket
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

from outrider import Runtime
from outrider.plans.errors import ClosedError
from outrider.runtime.__main__ import main
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.server.app import ServerConfig, make_app
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.served import ServedRuntime
from tests.integration.served import ServerProcess, client_of, get, server_process, wait_until

LONG: dict[str, Any] = {
    "model": "toy", "prompt": [5], "max_tokens": 140, "temperature": 0, "ignore_eos": True, "drafter": "none"
}  # fmt: skip


def events_of(body: str) -> list[Any]:
    """The events of a stream that was given whole."""
    *events, done = (event.removeprefix("data: ") for event in body.removesuffix("\n\n").split("\n\n"))
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def streaming(server: ServerProcess) -> Callable[[], str]:
    """Begin a long stream; returns a function that reads the rest of it."""
    asked = json.dumps(LONG | {"stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(f"{server.address}/v1/completions", asked, headers))
    begun = answer.readline()

    def rest() -> str:
        with answer:
            return (begun + answer.read()).decode()

    return rest


def connected(server: ServerProcess) -> HTTPConnection:
    """A connection on which nothing has been sent."""
    connection = HTTPConnection(server.address.removeprefix("http://"), timeout=60)
    connection.connect()
    return connection


def asked(connection: HTTPConnection) -> int:
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


def test_phases_go_on_and_never_back() -> None:
    readiness = Readiness(Phase.LOADING)
    assert readiness.response == (503, {"status": "loading", "reason": "the plan is being loaded"})
    readiness.reach(Phase.WARMING)
    assert readiness.response[1]["status"] == "warming"
    readiness.reach(Phase.READY)
    assert readiness.response == (200, {"status": "ready"})
    readiness.reach(Phase.DRAINING)
    readiness.reach(Phase.READY)
    assert readiness.response[0] == 503
    assert readiness.response[1]["status"] == "draining"


def test_a_server_answers_probes_while_it_loads_and_while_it_drains(branch_plan: Path, tmp_path: Path) -> None:
    """Running and queued requests are finished after SIGTERM, new ones refused; then the process ends with 0."""
    go_on = tmp_path / "go on"
    with server_process(branch_plan, "--max-running", "1", pass_seconds=0.05, load_behind=go_on) as server:
        assert server.get("/health/live") == (200, {"status": "live"})
        status, body = server.get("/health/ready")
        assert (status, body["status"]) == (503, "loading")
        assert server.get("/health")[0] == 503
        with client_of(server.address) as client, pytest.raises(openai.InternalServerError) as early:
            client.completions.create(model="toy", prompt="x")
        assert (early.value.status_code, early.value.code) == (503, "loading")
        assert early.value.response.headers["retry-after"] == "5"
        assert early.value.request_id
        go_on.touch()
        wait_until(server.ready)
        assert server.get("/health") == (200, {"status": "ok"})
        assert server.get("/health/live") == (200, {"status": "live"})

        with ThreadPoolExecutor(2) as pool:
            rest = streaming(server)
            queued = pool.submit(server.get, "/v1/completions", **LONG | {"max_tokens": 5})
            with client_of(server.address) as client:
                client.models.list()
                silent, idle = connected(server), connected(server)
                assert asked(idle) == 200
                half = sent_in_part(server)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: server.get("/health/ready")[1]["status"] == "draining")
                with pytest.raises(openai.InternalServerError) as late:
                    client.completions.create(model="toy", prompt="x")
                with closing(idle), closing(silent):
                    assert idle.sock.recv(1) == b""  # closed, as all connections that idle after an answer
                    assert asked(silent) == 503  # its first request, which could have been on its way
            assert (late.value.status_code, late.value.code) == (503, "shutting_down")
            assert late.value.response.headers["retry-after"] == "5"
            assert late.value.response.headers["connection"] == "close"
            assert server.get("/health/live") == (200, {"status": "live"})
            assert server.process.poll() is None
            half.sendall(b"}")  # the rest of a body whose request had come before
            events = events_of(rest())
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert sum(bool(event["choices"][0]["text"]) for event in events) > 100
            status, body = queued.result(60)
            assert (status, body["usage"]["completion_tokens"]) == (200, 5)
            with half:
                assert half.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    ("drain_seconds", "signals"),
    [pytest.param("0.5", 1, id="time is up", marks=pytest.mark.long), pytest.param("60", 2, id="second SIGTERM")],
)
def test_what_cannot_end_in_time_is_cut_off_and_told(branch_plan: Path, drain_seconds: str, signals: int) -> None:
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
            *_, last, error = events_of(rest())
            answers = [each.result(60) for each in whole]
            assert server.process.wait(60) == 0
            assert "Traceback" not in server.said
    assert last["choices"][0]["finish_reason"] == "length"
    assert error["error"]["code"] == "shutting_down"
    assert [(status, body["error"]["code"]) for status, body in answers] == [(503, "shutting_down")] * 2
    said = sorted(body["error"]["message"] for _, body in answers)
    assert "cut off after 0 tokens" in said[0]
    assert re.search("cut off after [1-9][0-9]* tokens", said[1])


def metric(server: ServerProcess, name: str) -> float:
    text = get(f"{server.address}/metrics")[1]
    (line,) = (line for line in text.splitlines() if line.startswith(f"outrider_{name} "))
    return float(line.split()[1])


class Elsewhere:
    """No more than what the server needs of that which generates, without a prefix cache."""

    prefix_cache = None

    def __init__(self, runtime: Runtime) -> None:
        self.tokenizer, self.grammars, self.manifest = runtime.tokenizer, runtime.grammars, runtime.manifest
        self.submit_all, self.save_prefix_cache, self.close = (
            runtime.submit_all, runtime.save_prefix_cache, runtime.close
        )  # fmt: skip

    @property
    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(waiting=3, running=2, kv_slots=100, kv_used=25)


def test_the_application_serves_anything_that_generates_in_any_server(branch_plan: Path) -> None:
    runtime = Runtime.load(branch_plan, threads=1)
    served: ServedRuntime = Elsewhere(runtime)
    readiness = Readiness()
    app = make_app(served, ServerConfig("toy", api_key="k", tokens_per_minute=1000), readiness=readiness)
    with TestClient(app) as client:
        assert client.get("/health/ready").json() == {"status": "ready"}
        headers = {"Authorization": "Bearer k", "x-request-id": "mine"}
        answer = client.post("/v1/completions", json=LONG | {"max_tokens": 3}, headers=headers)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert (answer.headers["x-request-id"], answer.headers["x-ratelimit-limit-tokens"]) == ("mine", "1000")
        text = client.get("/metrics").text
        for name, number in (("waiting", 3.0), ("running", 2.0)):
            assert f'vllm:num_requests_{name}{{engine="0",model_name="toy"}} {number}' in text
            assert f"outrider_requests_{name} {number}" in text
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="toy"} 0.25' in text
        assert "vllm:cache_config_info" not in text
    assert readiness.draining
    with pytest.raises(ClosedError):
        runtime.submit([5])


def test_a_server_that_is_told_to_end_while_it_loads_ends(branch_plan: Path, tmp_path: Path) -> None:
    with server_process(branch_plan, load_behind=tmp_path / "never") as server:
        assert server.get("/health/ready")[0] == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_plan_that_cannot_be_loaded_ends_the_server_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "plan" in capsys.readouterr().err.splitlines()[-1]
