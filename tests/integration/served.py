"""A server in a thread of the test, or in a process of its own, and how the tests ask it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import openai
import uvicorn

from outrider import Runtime
from outrider.runtime.server.app import make_app
from outrider.runtime.server.command import bound_socket
from outrider.runtime.server.config import Limits, ServerConfig
from outrider.runtime.server.connections import server_of
from outrider.runtime.server.readiness import Readiness

if TYPE_CHECKING:  # which needs OpenTelemetry
    from outrider.runtime.server.tracing import Tracing

KEY = "a key"


@contextmanager
def listening(runtime: Runtime, limits: Limits | None = None, drain_seconds: float = 5, **config: Any) -> Iterator[str]:
    """A server of its own for a while; its address."""
    bound = bound_socket("127.0.0.1", 0)
    with serving(runtime, bound, limits or Limits(), drain_seconds, **config):
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def serving(
    runtime: Runtime,
    bound: socket.socket,
    limits: Limits,
    drain_seconds: float = 5,
    tracing: Tracing | None = None,
    **options: Any,
) -> Iterator[uvicorn.Server]:
    """The same at a socket."""
    runtime.start()
    readiness = Readiness()
    config = ServerConfig("toy", drain_seconds=drain_seconds, **options)
    app = make_app(runtime, config, readiness=readiness, tracing=tracing)
    end = partial(runtime.close, drain=False, timeout=60)
    server = server_of(app, limits, drain_seconds, end, readiness)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def client_of(address: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def settle(runtime: Runtime) -> None:
    """Wait until nothing runs."""
    wait_until(lambda: not (runtime.scheduler_stats.running or runtime.scheduler_stats.waiting))


def connected(address: str, timeout: float = 60) -> socket.socket:
    """A connection on which nothing has been sent."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout)


def sent(address: str, data: bytes) -> bytes:
    """Everything that a server answers until it closes the connection."""
    with connected(address) as plain:
        plain.sendall(data)
        return b"".join(iter(lambda: plain.recv(4096), b""))


def answers(url: str) -> bool:
    """Whether a GET has the status 200."""
    with suppress(OSError):
        return get(url)[0] == 200
    return False


def get(url: str, headers: dict[str, str] | None = None, data: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers or {})) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# `serve` with passes that take as long as the environment says, and a plan that is loaded once a file is there.
_SLOW_SERVE = """
import os, sys, time
from pathlib import Path
from outrider import Runtime
from outrider.runtime.step_loop import StepLoop
from outrider.runtime.__main__ import main

step, load = StepLoop.step, Runtime.load

def slowly(self, *arguments):
    time.sleep(float(os.environ["TEST_PASS_SECONDS"]))
    return step(self, *arguments)

def late(*arguments, **options):
    while not Path(os.environ["TEST_LOAD_AFTER"]).exists():
        time.sleep(0.01)
    return load(*arguments, **options)

StepLoop.step, Runtime.load = slowly, late
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@dataclass
class ServerProcess:
    """A server in a process of its own; `said` is what it has written to standard error."""

    process: subprocess.Popen[bytes]
    address: str
    _log: TextIO

    @property
    def said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a GET, or of a POST with this body."""
        headers = {"Content-Type": "application/json"}
        status, text = get(f"{self.address}{path}", headers, json.dumps(body).encode() if body else None)
        return status, json.loads(text)

    def ready(self) -> bool:
        return answers(f"{self.address}/health/ready")


@contextmanager
def server_process(
    plan: Path,
    *arguments: str,
    pass_seconds: float = 0.0,
    load_after: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServerProcess]:
    """`outrider serve` at a free port, from when it listens. Its plan is loaded once the file `load_after` exists."""
    command = [sys.executable, "-c", _SLOW_SERVE, str(plan), "--port", "0", "--threads", "1", "--model-name", "toy"]
    patched = {"TEST_PASS_SECONDS": str(pass_seconds), "TEST_LOAD_AFTER": str(load_after or plan)}
    with tempfile.TemporaryFile("w+") as log:
        settings = {**os.environ, **patched, **(environment or {})}
        process = subprocess.Popen([*command, *arguments], stderr=log, env=settings)
        server = ServerProcess(process, "", log)
        try:
            wait_until(lambda: re.search(r"listening at \S+,", server.said) is not None or process.poll() is not None)
            found = re.search(r"listening at (\S+),", server.said)
            assert found is not None, server.said
            server.address = found[1]
            yield server
        finally:
            process.kill()  # nothing to one that has ended
            process.wait(60)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.02)
