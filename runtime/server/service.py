"""The server of a plan, from its first moment to its last: it listens while the plan is loaded in a thread."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.runtime.prefix_cache.file import OtherCacheError
from outrider.runtime.runtime import Runtime
from outrider.runtime.server.app import ServerConfig, make_app
from outrider.runtime.server.connections import Limits, server_of
from outrider.runtime.server.late_app import LateApp
from outrider.runtime.server.readiness import Phase, Readiness, warm_up
from outrider.runtime.server.served import CUTTING_SECONDS

if TYPE_CHECKING:
    from outrider.runtime.server.tracing import Tracing

_LOADING = 1.0  # seconds for a plan that is still being loaded when the server has ended


class Service:
    """`load_plan` is called once, in a thread. `say` tells the operator how far it has come.

    `interrupted` is the exit status of a process that Ctrl-C ends while the plan is loaded.
    """

    def __init__(
        self,
        load_plan: Callable[[], Runtime],
        config: ServerConfig,
        limits: Limits,
        say: Callable[[str], object],
        tracing: Tracing | None = None,
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
        """Serve at a socket, whose address is told, until the process is to end. Raises what loading the plan does."""
        self._say(f"listening at {address}, and loading the plan")
        loading = threading.Thread(target=self._load, args=[address], name="outrider-loading", daemon=True)
        loading.start()
        try:
            self._server.run([bound])
        finally:
            loading.join(_LOADING)
            if loading.is_alive():  # in a library that cannot be told to stop; nothing is there that is to be kept
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
    """Take in a saved prefix cache. One of the plan that was served before is passed over: a new plan is to start."""
    try:
        return f"{runtime.load_prefix_cache(file)} tokens of earlier prompts are warm"
    except OtherCacheError as error:
        return f"warning: no earlier prompts are warm, and the file is written anew at the end: {error}"
