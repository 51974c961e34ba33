"""Whether the results of a plan depend on the kind of processor."""

from __future__ import annotations

from collections.abc import Mapping

from plans import names
from plans.manifest import Manifest
from runtime.backends import on_processor
from runtime.exactness import kernels_here

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


def told_foreign(foreign: str) -> str:
    return (
        f"This node has {foreign}, and ONNX Runtime multiplies floats otherwise there, so that results could differ: "
        "use nodes of one kind, or a plan with weights of int8 or int4, which have the same bits everywhere."
    )
