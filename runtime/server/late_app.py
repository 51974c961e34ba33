"""The application of a server whose plan is still being loaded: it answers probes, and others with a 503.

The server listens from its start on, so that a supervisor sees a process that lives and is not ready, instead of a port
that is closed, which looks like a process that hangs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.runtime.server.errors import loading, shutting_down
from outrider.runtime.server.readiness import Phase, Readiness
from outrider.runtime.server.request_ids import HEADER, id_of


class LateApp:
    """An ASGI application that becomes another one, which begins to live then, and ends when this one does."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness
        self._coming: Future[FastAPI] = Future()
        self._serving: Future[None] = Future()
        self._app: FastAPI | None = None

    def come(self, app: FastAPI) -> bool:
        """Serve `app` from now on, and be ready; for another thread than the server's.

        Returns once it is served, or False where the server ends before.
        """
        self._coming.set_result(app)
        self._serving.result()
        return self._app is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await (self._app or self._not_yet)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # that it starts up
        await send({"type": "lifespan.startup.complete"})
        end = asyncio.ensure_future(receive())
        coming = asyncio.wrap_future(self._coming)
        try:
            await asyncio.wait((coming, end), return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                app = coming.result()
                async with app.router.lifespan_context(app):
                    self._app = app
                    self._readiness.reach(Phase.READY)
                    self._serving.set_result(None)
                    await end
        finally:
            if not self._serving.done():
                self._serving.set_result(None)
        await send({"type": "lifespan.shutdown.complete"})

    async def _not_yet(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Probes are answered as the application answers them; `/health` says that it serves, and does not yet."""
        path = Request(scope).url.path
        if path == "/health/live":
            answer = JSONResponse({"status": "live"})
        elif path == "/health/ready":
            status, body = self._readiness.response
            answer = JSONResponse(body, status)
        else:
            phase = self._readiness.phase
            draining = phase is Phase.DRAINING
            error = shutting_down("the request was not begun") if draining else loading(phase.value)
            answer = JSONResponse(error.body, error.status, error.headers)
        answer.headers[HEADER] = id_of(scope["headers"])
        await answer(scope, receive, send)
