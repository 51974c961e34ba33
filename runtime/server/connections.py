"""Connections under limits of time and number, and their end, which uvicorn leaves to the application.

uvicorn closes a connection that is idle after an answer, and no other: one that sends its request a byte a minute,
nothing at all, or reads nothing of its answer, would stay for ever. And it takes connections until the process can open
no file more.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.plans.errors import RequestError
from outrider.runtime.server.config import Limits
from outrider.runtime.server.errors import ApiError, not_http, too_many_connections, too_slow
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.record import HEADER, id_of, new_id
from outrider.runtime.server.request_log import log_refusal

_LAST_WORDS = 3.0  # seconds for the ends of answers that were cut off to reach their clients
_WAITING = 2048  # connections that the system keeps until they are accepted: uvicorn's own number
_AT_ONCE = 16  # of them, those that the event loop takes before it does anything else
_REFUSED = 16  # above the most that may be open: those that are refused by an answer. More are closed at once
_PROBES = ("/health/live", "/health/ready", "/metrics")
_OTHER_FILES = 128  # open files of the process itself, and of connections that are being closed


def most_connections(asked: int | None = None) -> int:
    """`asked`, or the default of `Limits`, limited by the files that this process may open besides its own.

    Its limit of open files is raised where the system lets it. Raises RequestError where that is not enough.
    """
    wanted = Limits.max_connections if asked is None else asked
    try:
        import resource
    except ModuleNotFoundError:  # Windows, which has no such limit
        return wanted
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = wanted + _REFUSED + _OTHER_FILES
    if files != unlimited and files < needed:
        raised = needed if most_files == unlimited else min(needed, most_files)
        with suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, most_files))
            files = raised
    if files == unlimited or files >= needed:
        return wanted
    possible = files - _REFUSED - _OTHER_FILES
    if possible < 1 or asked is not None:
        raise RequestError(
            f"{wanted} connections need {needed} open files, and this process may open {files}; raise that with "
            f"`ulimit -n {needed}`" + (f", or pass --max-connections {possible}." if possible >= 1 else ".")
        )
    return possible


def server_of(
    app: ASGIApp, limits: Limits, drain_seconds: float, end: Callable[[], object], readiness: Readiness | None = None
) -> uvicorn.Server:
    """A server of `app` that keeps `limits`.

    After SIGTERM it lets `readiness`, which is the app's, drain, and waits `drain_seconds` for answers; meanwhile it
    listens, so that probes and new requests get an answer. Then it calls `end` in a thread, which is to end those that
    are left.
    """

    class Protocol(_TimedProtocol):
        pass

    Protocol.limits = limits
    config = uvicorn.Config(app, http=Protocol, ws="none", log_level="warning", access_log=False, backlog=_AT_ONCE)
    config.timeout_keep_alive = limits.idle_seconds  # type: ignore[assignment]  # the event loop takes fractions too
    return _Server(config, drain_seconds, end, readiness or Readiness())


class _TimedProtocol(H11Protocol):
    """A connection that is closed where its client is too slow. `limits` are those of all connections of a server.

    Time runs from the first moment that a head, or a body, is awaited until it is whole, however much of it comes.
    """

    limits: Limits
    _timer: asyncio.TimerHandle | None = None
    _awaited: object = None  # a state of h11's: IDLE for a head, SEND_BODY for a body
    _sending: asyncio.TimerHandle | None = None  # runs while bytes wait for the client to read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        above = len(self.connections) - self.limits.max_connections
        if above > _REFUSED:
            transport.abort()
            return
        if above > 0:
            self.app = _refusing(too_many_connections(self.limits.max_connections), self.app)
        transport.set_write_buffer_limits(high=0)  # so that writing pauses wherever bytes wait
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
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_sending()

    def _await_reading(self) -> None:
        """Begin to wait for the client to read, which it may do slowly."""
        left = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self.limits.send_seconds, self._has_it_read, left)

    def _has_it_read(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._await_reading()
        else:
            self.transport.abort()  # closing would wait until what is left is read

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _should_upgrade(self) -> bool:
        return False  # nothing here is asked by WebSocket; uvicorn would log an advice to install a package

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
        if self._awaited is h11.SEND_BODY:
            error, record = too_slow("body", seconds), self.scope.get("state", {}).get("record")
            if self._refuse(error, id_of(self.headers) if record is None else record.request_id) and record is not None:
                record.status = error.status
                record.refuse(error)
        elif self.conn.trailing_data[0]:
            self._refuse_unread(too_slow("head", seconds))
        self.transport.close()  # the application hears that its client has gone

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP; uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse_unread(not_http(status, str(error) or msg))
        self.transport.close()

    def _refuse_unread(self, error: ApiError) -> None:
        """Refuse a request of which the application has not heard."""
        request_id = new_id()
        if self._refuse(error, request_id):
            log_refusal(request_id, error)

    def _refuse(self, error: ApiError, request_id: str) -> bool:
        """Answer without the application; False where an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return False
        body = json.dumps(error.body).encode()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            HEADER: request_id,
        }
        head = h11.Response(status_code=error.status, headers=list(headers.items()))
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:  # whose application would answer too
            self.cycle.disconnected = True
        return True


def _refusing(error: ApiError, app: ASGIApp) -> ASGIApp:
    """Refuses all but probes and scrapes: a server that has much to do is not to be taken for one that is dead."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _PROBES:
            await app(scope, receive, send)
            return
        request_id = id_of(scope["headers"])
        log_refusal(request_id, error)
        await JSONResponse(error.body, error.status, error.headers | {HEADER: request_id})(scope, receive, send)

    return refuse


class _Server(uvicorn.Server):
    """Gives every answer an end after a signal to end; after a second one it waits no longer.

    SIGTERM is a way to end like any other: the command's status is 0 after it.
    """

    def __init__(
        self, config: uvicorn.Config, drain_seconds: float, end: Callable[[], object], readiness: Readiness
    ) -> None:
        super().__init__(config)
        self._drain_seconds, self._end, self._readiness = drain_seconds, end, readiness
        self._hurried = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for bound in sockets or ():  # asyncio takes as many at once as it has the system keep
            bound.listen(_WAITING)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._readiness.reach(Phase.DRAINING)
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurried.set)  # which wakes it up
        elif sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._readiness.reach(Phase.DRAINING)
        cutting = asyncio.create_task(self._cut_off())
        try:
            await self._drain()
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _drain(self) -> None:
        """Wait until the requests that run now are answered. Those that come meanwhile the application refuses.

        A connection on which nothing has been asked yet stays open: its first request may be on its way, and closing
        would reset it.
        """
        for connection in list(self.server_state.connections):
            if getattr(connection, "cycle", None) is not None:
                connection.shutdown()  # at once where it idles after an answer, else with its answer
        if running := set(self.server_state.tasks):
            await asyncio.wait(running)

    async def _cut_off(self) -> None:
        """After the time to drain, end what still runs; then close on those who do not read the end of it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), self._drain_seconds)
        await run_in_threadpool(self._end)
        await asyncio.sleep(_LAST_WORDS)
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()
