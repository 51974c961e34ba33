"""The backends that the runtime drives: which of a plan's runs here, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from outrider.plans.backends import BACKENDS
from outrider.plans.errors import PlanError
from outrider.plans.machine import processor
from outrider.plans.manifest import BackendPlan
from outrider.runtime.backends.base import Driver


class _Drivers(dict[str, Driver]):
    """Drivers by kind, each imported when it is first asked for, as its library may be missing."""

    def __missing__(self, kind: str) -> Driver:
        driver: Driver = import_module(f"{__name__}.{BACKENDS[kind].module}").DRIVER
        return self.setdefault(kind, driver)


DRIVERS = _Drivers()


def device_of(name: str) -> str:
    """The model of what a backend computes on here: the processor, or the GPU."""
    if BACKENDS[name].on_processor:
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
    best_first = [*(name for name in reversed(BACKENDS) if name in available), *sorted(available.keys() - BACKENDS)]
    passed_over: dict[str, str] = {}
    for name in best_first:
        if (reason := reason_against(name, available[name])) is None:
            return BackendChoice(name, passed_over)
        passed_over[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    raise PlanError(f"no backend of the plan can run here: {reasons}")


def reason_against(name: str, plan: BackendPlan | None) -> str | None:
    """Why this machine cannot run `plan`, or with None any plan, on the backend `name`; None where it can."""
    if name not in BACKENDS:
        return f"this runtime does not drive it; it drives {', '.join(BACKENDS)}"
    return DRIVERS[name].reason(plan)
