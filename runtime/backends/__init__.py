"""Backends the runtime can drive, best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from outrider.plans.errors import PlanError
from outrider.plans.machine import processor
from outrider.plans.manifest import BackendPlan
from outrider.runtime.backends.base import Backend, Settings


@dataclass(frozen=True)
class Driver:
    """How a backend is driven: `reason` says why this machine cannot, or None."""

    reason: Callable[[BackendPlan], str | None]
    make: Callable[[BackendPlan, Settings], Backend]


_Reason = Callable[[BackendPlan], str | None]
_Make = Callable[[BackendPlan, Settings], Backend]


def _lazily(load: Callable[[], tuple[_Reason, _Make]]) -> Driver:
    """A backend whose library is imported when it is asked for."""
    return Driver(lambda plan: load()[0](plan), lambda plan, settings: load()[1](plan, settings))


def _onnxruntime_cuda() -> tuple[_Reason, _Make]:
    from outrider.runtime.backends import onnxruntime_cuda as backend

    return backend.reason_against, backend.OnnxRuntimeCuda


def _cuda() -> tuple[_Reason, _Make]:
    from outrider.runtime.backends import cuda as backend

    return backend.reason_against, backend.Cuda


def _tensorrt(library: str) -> tuple[_Reason, _Make]:
    from outrider.runtime.backends import tensorrt as backend

    which = getattr(backend, library)
    return partial(backend.reason_against, which), partial(backend.TensorRt, which)


def _onnxruntime_cpu(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu

    return OnnxRuntimeCpu(settings)


BACKENDS: dict[str, Driver] = {
    "tensorrt": _lazily(partial(_tensorrt, "TENSORRT")),
    "tensorrt-rtx": _lazily(partial(_tensorrt, "RTX")),
    "onnxruntime-cuda": _lazily(_onnxruntime_cuda),
    "cuda": _lazily(_cuda),
    "onnxruntime-cpu": Driver(lambda plan: None, _onnxruntime_cpu),
}


def on_processor(name: str) -> bool:
    """Whether a backend computes on the processor, not on a GPU."""
    return name == "onnxruntime-cpu"


def device_of(name: str) -> str:
    """The model of what a backend computes on here: the processor, or the GPU."""
    if on_processor(name):
        return processor()
    from outrider.runtime.backends.cuda_driver import device_name

    return device_name()


@dataclass(frozen=True)
class BackendChoice:
    """The backend to run, and why each better one of the plan was passed over."""

    backend: str
    passed_over: dict[str, str]


def choose_backend(available: Mapping[str, BackendPlan], wanted: str | None) -> BackendChoice:
    """The wanted one, or the best that the plan has and this machine can run. Raises `PlanError` for none."""
    if wanted is not None:
        if wanted not in available:
            raise PlanError(f"the plan has no backend {wanted!r}; it holds {', '.join(available)}")
        if reason := reason_against(wanted, available[wanted]):
            raise PlanError(f"the backend {wanted!r} cannot run here: {reason}")
        return BackendChoice(wanted, {})
    if not available:
        raise PlanError("the plan holds no backend; build it again")
    order = [*(name for name in BACKENDS if name in available), *(name for name in available if name not in BACKENDS)]
    passed_over: dict[str, str] = {}
    for name in order:
        if (reason := reason_against(name, available[name])) is None:
            return BackendChoice(name, passed_over)
        passed_over[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    raise PlanError(f"no backend of the plan can run here: {reasons}")


def reason_against(name: str, plan: BackendPlan) -> str | None:
    """Why this machine cannot run the backend `name`; None where it can."""
    if name not in BACKENDS:
        return f"this runtime does not drive it; it drives {', '.join(BACKENDS)}"
    return BACKENDS[name].reason(plan)
