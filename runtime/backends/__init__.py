"""Backends the runtime can drive, best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outrider.plans.errors import PlanError
from outrider.plans.machine import processor
from outrider.plans.manifest import BackendPlan
from outrider.runtime.backends.base import Backend, Settings


@dataclass(frozen=True)
class Driver:
    """How a backend is driven: `reason` says why this machine cannot, or None."""

    reason: Callable[[BackendPlan], str | None]
    make: Callable[[BackendPlan, Settings], Backend]


def _cuda_reason(plan: BackendPlan) -> str | None:
    from outrider.runtime.backends import onnxruntime_cuda

    return onnxruntime_cuda.reason_against(plan)


def _make_cuda(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends.onnxruntime_cuda import OnnxRuntimeCuda

    return OnnxRuntimeCuda(plan, settings)


def _own_reason(plan: BackendPlan) -> str | None:
    from outrider.runtime.backends import cuda

    return cuda.reason_against(plan)


def _make_own(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends.cuda import Cuda

    return Cuda(plan, settings)


def _tensorrt_reason(plan: BackendPlan) -> str | None:
    from outrider.runtime.backends import tensorrt

    return tensorrt.reason_against(tensorrt.TENSORRT, plan)


def _make_tensorrt(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends import tensorrt

    return tensorrt.TensorRt(tensorrt.TENSORRT, plan, settings)


def _rtx_reason(plan: BackendPlan) -> str | None:
    from outrider.runtime.backends import tensorrt

    return tensorrt.reason_against(tensorrt.RTX, plan)


def _make_rtx(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends import tensorrt

    return tensorrt.TensorRt(tensorrt.RTX, plan, settings)


def _make_cpu(plan: BackendPlan, settings: Settings) -> Backend:
    from outrider.runtime.backends.onnxruntime_cpu import OnnxRuntimeCpu

    return OnnxRuntimeCpu(settings)


BACKENDS: dict[str, Driver] = {
    "tensorrt": Driver(_tensorrt_reason, _make_tensorrt),
    "tensorrt-rtx": Driver(_rtx_reason, _make_rtx),
    "onnxruntime-cuda": Driver(_cuda_reason, _make_cuda),
    "cuda": Driver(_own_reason, _make_own),
    "onnxruntime-cpu": Driver(lambda plan: None, _make_cpu),
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
    told = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    raise PlanError(f"no backend of the plan can run here: {told}")


def reason_against(name: str, plan: BackendPlan) -> str | None:
    """Why this machine cannot run the backend `name`; None where it can."""
    if name not in BACKENDS:
        return f"this runtime does not drive it; it drives {', '.join(BACKENDS)}"
    return BACKENDS[name].reason(plan)
