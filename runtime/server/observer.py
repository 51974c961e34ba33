"""The outermost layer of the application: every request gets an id and a record, which listeners get at its end.

A request is over when its answer is, and when nothing of it runs any longer: a client that goes leaves choices that end
with their pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.runtime.server.errors import failed
from outrider.runtime.server.record import HEADER, Record, id_of, path_of

_LOG = logging.getLogger("outrider")
_LAST = 2.0  # seconds for requests whose clients have gone to end, when the server does

Listener = Callable[[Record], None]


class Tracer(Protocol):
    """Traces requests (`tracing.Tracing`)."""

    def begin(self, record: Record, request: Request) -> None: ...

    def end(self, record: Record) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Endings:
    """Calls `listeners` for each request once it is over: in the event loop, so that they must be quick."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = listeners
        self._late = set[asyncio.Task[None]]()

    def over(self, record: Record) -> None:
        """The answer has ended."""
        if record.done:
            self._call(record)
            return
        task = asyncio.create_task(self._wait(record))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _wait(self, record: Record) -> None:
        if record.preparing is not None:  # a thread, which may submit the request yet
            await asyncio.wait([record.preparing])
        for handle in record.handles:  # nobody reads them any longer
            handle.cancel()
        await asyncio.gather(*record.handles, return_exceptions=True)
        self._call(record)

    def _call(self, record: Record) -> None:
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:  # a fault in a listener must not end a request
                _LOG.exception("request %s was answered, and a listener failed", record.request_id)

    async def close(self) -> None:
        """Wait for what is outstanding, at most some seconds."""
        if self._late:
            await asyncio.wait(self._late, timeout=_LAST)


class Observer:
    """Begins a record for each request, and puts its id into the head of any answer.

    `begun` is called with the record and the request's head. An exception that nobody has handled becomes an answer in
    OpenAI's shape here, or closes the connection where the answer has begun.
    """

    def __init__(self, app: ASGIApp, endings: Endings, begun: Callable[[Record, Request], None] | None = None) -> None:
        self._app, self._endings, self._begun = app, endings, begun

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        record = Record(id_of(scope["headers"]), request.method, path_of(scope))
        request.state.record = record
        if self._begun is not None:
            self._begun(record, request)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = record.request_id
                headers.update(record.headers)
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # while an answer is sent
        except Exception as fault:
            record.fault = fault
            if record.status:
                raise
            error = failed(record.request_id)
            record.refuse(error)
            await JSONResponse(error.body, error.status)(scope, receive, send_with_id)
        finally:
            record.end()
            self._endings.over(record)
