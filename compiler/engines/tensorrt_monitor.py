"""Progress of a TensorRT builder."""

from __future__ import annotations

from typing import Any

from outrider.compiler.engines.report import Report


def make_monitor(trt: Any, report: Report) -> Any:
    """Return a monitor that reports the builder's outer phases as they begin."""

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
