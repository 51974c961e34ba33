"""Connections under limits of time and number, and their end: what uvicorn leaves to whoever listens.

uvicorn closes a connection that is idle behind an answer, and no other: one that sends its request a byte a minute, or
nothing at all, would stay for ever.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from plans.errors import RequestError
from runtime.server.answers import error_body

_LAST_WORDS = 3.0  # seconds for the ends of answers that were cut off to reach their clients


@dataclass(frozen=True)
class Limits:
    """Seconds that a connection has for the head of a request and then for its body, and may idle between two requests;
    and how many connections may be open."""

    head_seconds: float = 10.0
    body_seconds: float = 60.0
    idle_seconds: float = 15.0
    max_connections: int = 1024

    def __post_init__(self) -> None:
        for name in ("head_seconds", "body_seconds", "idle_seconds"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < inf:
                raise RequestError(f"{name} is {value!r}; pass a number of seconds above 0.")
        if type(self.max_connections) is not int or self.max_connections < 1:
            raise RequestError(f"max_connections is {self.max_connections!r}; pass a whole number of at least 1.")


def server_of(app: ASGIApp, limits: Limits, drain_seconds: float, end: Callable[[], object]) -> uvicorn.Server:
    """A server of `app` that keeps `limits`. Once told to end, it waits `drain_seconds` for answers, then calls `end`
    in a thread, which is to end those that are left."""

    class Protocol(_TimedProtocol):
        pass

    Protocol.limits = limits
    config = uvicorn.Config(app, http=Protocol, ws="none", log_level="warning", access_log=False)
    config.timeout_keep_alive = limits.idle_seconds  # type: ignore[assignment]  # the event loop takes fractions too
    return _Server(config, drain_seconds, end)


class _TimedProtocol(H11Protocol):
    """A connection that is closed where its client is too slow. `limits` are those of all connections of a server.

    Time runs from the first moment that a head, or a body, is awaited until it is whole, however much of it comes.
    """

    limits: Limits
    _timer: asyncio.TimerHandle | None = None
    _awaited: object = None  # a state of h11's: IDLE for a head, SEND_BODY for a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.app = _refuse_connection
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:  # it may idle: uvicorn's own timer runs until data comes
            self._stop()
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._awaited = None

    def _watch(self) -> None:
        """Begin to wait for what the client owes, unless that has begun."""
        state = self.conn.their_state
        if state is self._awaited:
            return
        self._stop()
        seconds = {h11.IDLE: self.limits.head_seconds, h11.SEND_BODY: self.limits.body_seconds}.get(state)
        if seconds is not None:
            self._awaited = state
            self._timer = self.loop.call_later(seconds, self._too_slow, seconds)

    def _too_slow(self, seconds: float) -> None:
        if self.transport.is_closing():
            return
        begun = self._awaited is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            part = "body" if self._awaited is h11.SEND_BODY else "head"
            message = f"The request's {part} has not come within {seconds:g} s; send the request again."
            body = json.dumps(error_body(message, "invalid_request_error")).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()  # the application hears that its client has gone


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    message = "Too many connections are open; try again later."
    answer = JSONResponse(error_body(message, "rate_limit_error"), 503, {"Connection": "close", "Retry-After": "1"})
    await answer(scope, receive, send)


class _Server(uvicorn.Server):
    """Gives every answer an end when it is told to end itself; told again, it waits no longer.

    SIGTERM is a way to end like any other: the command's status is 0 behind it.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float, end: Callable[[], object]) -> None:
        super().__init__(config)
        self._drain_seconds, self._end = drain_seconds, end
        self._hurried = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurried.set()
        elif sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.create_task(self._cut_off())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut_off(self) -> None:
        """Behind the time to drain, end what still runs; then close on those who do not read the end of it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), self._drain_seconds)
        await run_in_threadpool(self._end)
        await asyncio.sleep(_LAST_WORDS)
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()
