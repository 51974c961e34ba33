"""ONNX Runtime on an NVIDIA GPU: engines on the session's stream and buffers, our ops' kernels between them.

Its CUDA sessions cannot be recorded inside a caller's graph capture; an engine is enqueued by each call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from plans import names
from plans.buffers import DType, Tensor
from plans.errors import PlanError
from plans.manifest import Engine, TargetPlan
from runtime.backends.base import BoundEngine, LoadedEngine
from runtime.backends.cuda_driver import CudaDevice, architecture, fitting_kernels
from runtime.backends.device import DeviceBuffers
from runtime.buffers import Buffers

_PROVIDER = "CUDAExecutionProvider"
_BFLOAT16 = 16  # ONNX's number of the type, which NumPy lacks


def reason_against(plan: TargetPlan) -> str | None:
    """Why this machine cannot run the target; None where it can."""
    if _PROVIDER not in ort.get_available_providers():
        return f"this onnxruntime {ort.__version__} has no {_PROVIDER}; install onnxruntime-gpu in its place"
    try:
        own = architecture()
    except PlanError as error:
        return str(error)
    if fitting_kernels(own, list(plan.kernels)) is None:
        return f"the GPU is {own}, and our ops were compiled for {', '.join(plan.kernels)}; add it to the recipe"
    return None


class OnnxRuntimeCuda:
    """One device and one stream for all sessions, on which engines and ops run in order."""

    def __init__(self, plan: TargetPlan) -> None:
        self._device = CudaDevice()
        own = architecture()
        fitting = fitting_kernels(own, list(plan.kernels))
        if fitting is None:
            raise PlanError(f"the plan has no kernels for {own}, it has them for {', '.join(plan.kernels)}")
        self._cubin: str | None = plan.kernels[fitting]

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        if self._cubin is not None:  # the plan is where its engines are: engines/TARGET/FILE
            self._device.load_kernels(path.parent.parent.parent / self._cubin)
            self._cubin = None
        options = ort.SessionOptions()
        options.log_severity_level = 3
        provider = {"device_id": str(self._device.ordinal), "user_compute_stream": str(int(self._device.stream))}
        try:
            session = ort.InferenceSession(str(path), options, providers=[(_PROVIDER, provider)])
        except Exception as error:  # ONNX Runtime raises bare RuntimeErrors of its own kinds
            raise PlanError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}") from None
        return DeviceEngine(session, engine, ("cuda", self._device.ordinal))

    def buffers(self, plan: TargetPlan) -> Buffers:
        return DeviceBuffers(plan, self._device)


class DeviceEngine:
    """An ONNX Runtime session whose tensors lie at addresses of a place: ("cuda", ordinal)."""

    def __init__(self, session: ort.InferenceSession, engine: Engine, place: tuple[str, int]) -> None:
        self._session, self._engine, self._place = session, engine, place

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        assert isinstance(buffers, DeviceBuffers)
        return _BoundEngine(self._session, self._engine, buffers, bound, self._place)


class _BoundEngine:
    def __init__(
        self,
        session: ort.InferenceSession,
        engine: Engine,
        buffers: DeviceBuffers,
        bound: dict[str, str],
        place: tuple[str, int],
    ) -> None:
        self._session, self._binding, self._keep = session, session.io_binding(), buffers  # addresses must stay valid
        self._tensors = [
            (tensor, buffers.memory[bound[tensor.name]].address, bind)
            for tensors, bind in (
                (engine.inputs, self._binding.bind_input),
                (engine.outputs, self._binding.bind_output),
            )
            for tensor in tensors
        ]
        self._place, self._sizes = place, list[int]()
        self._options = ort.RunOptions()
        # The program waits once, behind its last stage.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def __call__(self, sizes: list[int]) -> None:
        if sizes != self._sizes:
            for tensor, address, bind in self._tensors:
                bind(tensor.name, *self._place, _element_type(tensor.dtype), _shape(tensor, sizes), address)
            self._sizes = sizes.copy()
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime raises plain Exceptions of its own kinds
            raise PlanError(f"an engine of the plan failed on the GPU: {error}") from None


def _shape(tensor: Tensor, sizes: list[int]) -> list[int]:
    return [sizes[names.SYMBOLS.index(d)] if isinstance(d, str) else d for d in tensor.shape]


def _element_type(dtype: DType) -> Any:
    return _BFLOAT16 if dtype is DType.BFLOAT16 else np.dtype(dtype.numpy).type
