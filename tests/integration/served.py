"""A server in a thread of the test, and how the tests ask it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import openai
import uvicorn

from runtime import Runtime
from runtime.server.app import ServerConfig, make_app
from runtime.server.command import bound_socket
from runtime.server.connections import Limits, server_of
from runtime.server.readiness import Readiness
from runtime.server.tracing import Tracing

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
    end = partial(runtime.close, drain=False, timeout=20)
    server = server_of(app, limits, drain_seconds, end, readiness)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def client_of(address: str, key: str = "-") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


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
