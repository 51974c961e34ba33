"""What a builder says while it works."""

from __future__ import annotations

from typing import Any

from compiler.engines.report import Report


def make_log(trt: Any) -> Any:
    """A logger that keeps errors, for the sentence that is raised, and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self._errors.append(" ".join(message.split()))

        def clear(self) -> None:
            self._errors.clear()

        def said(self) -> str:
            return "; ".join(self._errors) or "it gives no reason"

    return Log()


def make_monitor(trt: Any, report: Report) -> Any:
    """Reports the builder's outer phases as they begin."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            if not parent:
                report(phase)

        def step_complete(self, phase: str, step: int) -> bool:
            return True

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()
