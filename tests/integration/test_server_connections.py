"""Connections of the server: clients that are slow, silent or too many."""

from __future__ import annotations

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

import pytest

from outrider import Runtime
from outrider.runtime.server.command import bound_socket
from outrider.runtime.server.config import Limits
from tests.integration.served import KEY, answers, connected, get, listening, serving, wait_until
from tests.integration.served import sent as everything_said


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
