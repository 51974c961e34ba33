"""`python -m outrider.runtime serve` in a process of its own, and what that process holds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

import psutil

from outrider.plans.errors import PlanError
from outrider.tools.lab.faults.client import FAILURES, get
from outrider.tools.lab.faults.figures import Held

MODEL = "faults"
_STARTING = 180.0  # seconds, of a large plan on a machine that does other things


def held_by(pid: int) -> Held:
    process = psutil.Process(pid)
    return Held(process.num_fds(), process.num_threads(), process.memory_info().rss / 1e6)


class Server:
    """A server of `plan` with more `options`; what it says is in `log`. Ended with the block, and killed if it stays.
    `command` is that of `python -m`, and what goes before the plan.

    Raises PlanError, with its words, where it does not begin to serve.
    """

    def __init__(
        self,
        plan: Path,
        log: Path,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        command: Sequence[str] = ("outrider.runtime", "serve"),
    ) -> None:
        self._log = log
        words = [sys.executable, "-m", *command, str(plan), "--port", "0", "--model-name", MODEL, *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                words, stderr=file, stdout=file, env={**os.environ, **(environment or {})}, start_new_session=True
            )
        try:
            self.port = self._await_port()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def _await_port(self) -> int:
        until = monotonic() + _STARTING
        while monotonic() < until:
            if found := re.search(r"serving '.*' .*at http://127\.0\.0\.1:(\d+)\n", self.said):
                return int(found[1])
            if self.process.poll() is not None:
                break
            sleep(0.05)
        raise PlanError(f"The server has not begun to serve: {self.said[-1000:]}")

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def held(self) -> Held:
        return held_by(self.process.pid)

    def metrics(self) -> dict[str, float]:
        text = get(self.port, "/metrics")[1]
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def settle(self, seconds: float = 60.0) -> bool:
        """Wait until no request waits or runs; whether that came."""
        until = monotonic() + seconds
        while monotonic() < until:
            try:
                figures = self.metrics()
            except FAILURES:
                return False
            if not figures["outrider_requests_waiting"] and not figures["outrider_requests_running"]:
                return True
            sleep(0.05)
        return False

    def end(self, seconds: float = 60.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            try:
                self.end()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
