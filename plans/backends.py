"""The backends: what each runs on and what it can, as the compiler, the runtime and `outrider backends` read it.

The other halves of a backend are found by its kind: how it is built for, `compiler.backends.KIND`, and how it is run,
`runtime.backends.KIND`, with `_` for `-`. One without the first is built for as a reader of ONNX files of standard ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from outrider.plans.kv_slots import KvType

Feature = Literal["batching", "partial KV", "rejection", "experts", "recurrent states", "unsigned weights"]
"""What a backend may lack; every backend has the rest."""


@dataclass(frozen=True)
class BackendSupport:
    """What a backend can.

    It promises `exact` results if a row's bits depend on that row alone; kernels of GPUs, which choose by the size of a
    step, promise less. Its `weights` are of these types, and its KV cache of the weights' own, or of one of `kv_types`.
    A reason of `lacks` continues a sentence that begins with the backend's name. `extra` installs the packages that
    build for it, beside the compiler's, if any.
    """

    kind: str
    runs_on: Literal["CPU", "NVIDIA GPU"]
    weights: tuple[str, ...]
    kv_types: tuple[KvType, ...] = ()
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    exact: bool = False
    extra: str = "compiler"

    @property
    def on_processor(self) -> bool:
        """Whether it computes on the processor, in the host's memory."""
        return self.runs_on == "CPU"

    @property
    def module(self) -> str:
        """The name of the module of each of its halves."""
        return self.kind.replace("-", "_")


_INTEGERS = ("int8", "int4")
_ANY = ("float32", "bfloat16", "float16", *_INTEGERS)
_TENSORRT: dict[Feature, str] = {
    "batching": "appends the same number of slots to every row of a KV cache",
    "partial KV": "reads KV caches of one size alone",
    "unsigned weights": "reads integers with a sign alone",
}
_STATELESS: dict[Feature, str] = {"recurrent states": "has no kernels for layers that keep them"}
_NO_EXPERTS: dict[Feature, str] = {"experts": "has no kernels for them yet"}
_NO_FLOAT64: dict[Feature, str] = {"rejection": "has no float64, in which it sums"}

_BACKENDS = (
    BackendSupport("onnxruntime-cpu", "CPU", ("float32", *_INTEGERS), ("float16", "int8"), exact=True),
    BackendSupport("cuda", "NVIDIA GPU", _ANY, ("float16",), _STATELESS | _NO_EXPERTS, extra="gpu"),
    BackendSupport("onnxruntime-cuda", "NVIDIA GPU", _ANY, (), _STATELESS, extra="gpu"),
    BackendSupport("tensorrt-rtx", "NVIDIA GPU", _ANY, (), _TENSORRT | _STATELESS | _NO_FLOAT64, extra="tensorrt-rtx"),
    BackendSupport("tensorrt", "NVIDIA GPU", _ANY, (), _TENSORRT | _STATELESS, extra="tensorrt"),
)
BACKENDS = {backend.kind: backend for backend in _BACKENDS}
"""Backends by kind, in ascending order of preference: a machine runs the last one of a plan that it can."""

DEFAULT = "onnxruntime-cpu"
"""The backend that every machine can run."""
