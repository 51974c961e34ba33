"""The server of a plan, from its first moment to its last: it listens while the plan is loaded in a thread."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.runtime.prefix_cache.file import OtherCacheError
from outrider.runtime.runtime import Runtime
from outrider.runtime.server.app import make_app
from outrider.runtime.server.config import Limits, ServerConfig
from outrider.runtime.server.connections import server_of
from outrider.runtime.server.errors import loading, shutting_down
from outrider.runtime.server.observer import Tracer
from outrider.runtime.server.readiness import Phase, Readiness, warm_up
from outrider.runtime.server.record import HEADER, id_of
from outrider.runtime.server.served import CUTTING_SECONDS

_LOADING = 1.0  # seconds for a plan that is still being loaded when the server has ended


class Service:
    """`load_plan` is called once, in a thread. `say` reports progress to the operator.

    `interrupted` is the exit status of a process that Ctrl-C ends while the plan is loaded.
    """

    def __init__(
        self,
        load_plan: Callable[[], Runtime],
        config: ServerConfig,
        limits: Limits,
        say: Callable[[str], object],
        tracing: Tracer | None = None,
        *,
        interrupted: int,
    ) -> None:
        self._load_plan, self._config, self._say, self._tracing = load_plan, config, say, tracing
        self._interrupted = interrupted
        self._readiness = Readiness(Phase.LOADING)
        self._app = LateApp(self._readiness)
        self._server = server_of(self._app, limits, config.drain_seconds, self._end, self._readiness)
        self._runtime: Runtime | None = None
        self._failed: BaseException | None = None

    def run(self, bound: socket.socket, address: str) -> None:
        """Serve at a socket, at that address, until the process is to end. Raises what loading the plan does."""
        self._say(f"listening at {address}, and loading the plan")
        loading = threading.Thread(target=self._load, args=[address], name="outrider-loading", daemon=True)
        loading.start()
        try:
            self._server.run([bound])
        finally:
            loading.join(_LOADING)
            if loading.is_alive():  # in a library that cannot be stopped; nothing has to be kept
                sys.stderr.flush()
                os._exit(self._interrupted if isinstance(sys.exception(), KeyboardInterrupt) else 0)
        if self._failed is not None:
            raise self._failed

    def _load(self, address: str) -> None:
        """Load the plan, serve a first request, and have the server serve the others."""
        try:
            self._runtime = runtime = self._load_plan()
            runtime.start()
            file = self._config.cache_file
            if file is not None and file.exists():
                self._say(recall(runtime, file))
            self._readiness.reach(Phase.WARMING)
            warm_up(runtime)
            config = replace(self._config, model=self._config.model or runtime.manifest.name)
            app = make_app(runtime, config, readiness=self._readiness, tracing=self._tracing)
            if self._app.come(app):
                self._say(f"serving {config.model!r} at {address}")
        except BaseException as error:
            if not self._readiness.draining:  # else the server ends, and nobody waits for the plan
                self._failed = error
                self._server.should_exit = True

    def _end(self) -> None:
        """End what still runs."""
        if self._runtime is not None:
            self._runtime.close(drain=False, timeout=CUTTING_SECONDS)


def recall(runtime: Runtime, file: Path) -> str:
    """Load a saved prefix cache, if it is of this plan: a new plan starts without."""
    try:
        return f"{runtime.load_prefix_cache(file)} tokens of earlier prompts are warm"
    except OtherCacheError as error:
        return f"warning: no earlier prompts are warm, and the file is written anew at the end: {error}"


class LateApp:
    """An ASGI application that becomes another one, which begins to live then, and ends when this one does.

    The server listens from its start, so that a supervisor finds a live process that is not ready, not a closed port.
    """

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
