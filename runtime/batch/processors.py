"""Whether a loaded plan gives the results of a batch that was begun, perhaps on another kind of processor."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from socket import gethostname

from plans import names
from plans.errors import RequestError
from plans.manifest import Manifest
from runtime.backends import on_processor
from runtime.batch.folder import BatchState
from runtime.exactness import kernels_here
from runtime.runtime import Runtime

_OURS = {
    "BranchAttention", "GatedUnit", "MixtureOfExperts", "QuantGather", "QuantMatMul", "QuantMixtureOfExperts",
    "RmsNorm", "Route", "Softcap",
}  # fmt: skip
"""Ops that have the same bits on every processor (`plugins.onnxruntime_ops`); others are ONNX Runtime's."""


def foreign_kernels(manifest: Manifest, backend: str, begun: Mapping[str, str]) -> str | None:
    """What this machine has otherwise than the one where results were `begun`, if tokens may depend on it.

    They may where ONNX Runtime multiplies floats on the processor: it has other kernels for other ones.
    """
    if not on_processor(backend):
        return None
    probe = manifest.backends[backend].probe
    ops = [] if probe is None else [op.partition(": ") for op in probe.ops.values()]
    if probe is not None and all(op.split()[0] in _OURS for engine, _, op in ops if engine == names.TARGET):
        return None
    here = kernels_here()
    return next(
        (f"{key} {here.get(key)!r} instead of {then!r}" for key, then in begun.items() if here.get(key) != then), None
    )


def check_loaded(runtime: Runtime, plan: str | PathLike[str], state: BatchState) -> None:
    """Raise RequestError where the plan that was loaded, or this machine, would give other results than `state`."""
    if runtime.manifest.identity != state.plan:
        raise RequestError(
            f"{plan} is another plan on {gethostname()} than the batch was begun with; put that one there."
        )
    if foreign := foreign_kernels(runtime.manifest, state.backend, state.kernels):
        raise RequestError(
            f"{gethostname()} has {foreign}, and ONNX Runtime multiplies floats otherwise there, so that results "
            "could differ: use nodes of one kind, or a plan with weights of int8 or int4, the same bits everywhere."
        )
