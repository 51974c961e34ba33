"""Execution targets the runtime can drive, best first."""

from __future__ import annotations

from collections.abc import Callable

from plans.errors import PlanError
from runtime.backends.base import Backend
from runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu

BACKENDS: dict[str, Callable[[int], Backend]] = {"onnxruntime-cpu": OnnxRuntimeCpu}


def choose_target(available: list[str], wanted: str | None) -> str:
    """The execution target to run: the wanted one, or the best that the plan has and this runtime knows."""
    if wanted is not None:
        if wanted not in available:
            raise PlanError(f"the plan has no target {wanted!r}; it holds {', '.join(available)}")
        if wanted not in BACKENDS:
            raise PlanError(f"this runtime cannot drive target {wanted!r}; it drives {', '.join(BACKENDS)}")
        return wanted
    for name in BACKENDS:
        if name in available:
            return name
    raise PlanError(f"the plan holds {', '.join(available)}; this runtime drives {', '.join(BACKENDS)}")
