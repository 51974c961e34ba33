"""ONNX Runtime on an NVIDIA GPU: engines on the session's stream and buffers, our ops' kernels between them.

Its CUDA sessions cannot be recorded inside a caller's graph capture. They record themselves, once for every id that a
run is given: here one for each size of step of the warm-up. Recordings belong to the thread that made them, so that
all runs come from one.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime as ort

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.errors import PlanError
from outrider.plans.extras import install_on_gpu
from outrider.plans.manifest import BackendPlan, Engine
from outrider.plans.onnx_operators import check_operators
from outrider.runtime.backends.base import BoundEngine, Driver, LoadedEngine, Settings
from outrider.runtime.backends.cuda_driver import CudaDevice, PlanKernels, kernels_reason
from outrider.runtime.backends.device import DeviceBuffers, Memory, OnDevice
from outrider.runtime.backends.one_thread import OneThread
from outrider.runtime.execution.buffers import Buffers

_PROVIDER = "CUDAExecutionProvider"
LIBRARIES = ("libcudart.so.{cuda}", "libcublasLt.so.{cuda}", "libcublas.so.{cuda}", "libcurand.so.10", "libcudnn.so.9")
"""CUDA's, which the provider is linked with or opens."""
_BFLOAT16 = 16  # ONNX's number of the type, which NumPy lacks
_MOST_BOUND = 64  # sizes of plain steps for which an engine's tensors stay bound
MOST_GRAPHS = 4096  # of one engine, in all sessions: ONNX Runtime gives none back before the engine goes
_NO_GRAPH = "-1"
_LOG = logging.getLogger("outrider")
_Ready = tuple[ort.IOBinding, ort.RunOptions]


def reason_against(plan: BackendPlan | None) -> str | None:
    """Why this machine cannot run the plan, or any; None where it can."""
    if _PROVIDER not in ort.get_available_providers():
        return f"this onnxruntime {ort.__version__} has no {_PROVIDER}; {install_on_gpu()}"
    if reason := kernels_reason(plan):
        return reason
    if missing := _missing_libraries():
        return f"ONNX Runtime's {_PROVIDER} needs {', '.join(missing)}, which cannot be loaded; {install_on_gpu()}"
    return None


def _missing_libraries() -> list[str]:
    """Load the libraries, from NVIDIA's packages or from where the system finds them; return the names of those that
    cannot be loaded. On Windows none is looked for by name.

    Where one is missing, ONNX Runtime makes sessions without the provider, and says so in its log alone.
    """
    with redirect_stdout(StringIO()):  # where it prints what is missing
        ort.preload_dlls()
    if sys.platform != "linux":
        return []
    cuda = ort.cuda_version.partition(".")[0]
    return [name for name in (library.format(cuda=cuda) for library in LIBRARIES) if not _loads(name)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class OnnxRuntimeCuda(OnDevice):
    def __init__(self, plan: BackendPlan, settings: Settings) -> None:
        self._device = CudaDevice()
        super().__init__(self._device, records=settings.cuda_graphs, records_engines=False)
        self._thread = OneThread() if settings.cuda_graphs else None
        self._kernels = PlanKernels(self._device, plan)

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        check_operators(path)
        self._kernels.load(path)
        session, thread = self._open(path)
        if _PROVIDER not in session.get_providers():
            raise PlanError(
                f"ONNX Runtime {ort.__version__} has left its {_PROVIDER} out of the session for {path}, which would "
                "run on the CPU; its log says why"
            )
        return DeviceEngine(session, engine, ("cuda", self._device.ordinal), thread)

    def _open(self, path: Path) -> tuple[ort.InferenceSession, OneThread | None]:
        """A session, and the thread that it is to run in if it records itself."""
        if self._thread is not None:
            try:
                return self._session(path, graphs=True), self._thread
            except Exception as error:  # as below; it refuses graphs for what it computes on the CPU
                _LOG.warning("%s runs without CUDA graphs: %s", path, error)
        try:
            return self._session(path, graphs=False), None
        except Exception as error:  # ONNX Runtime raises bare RuntimeErrors of its own kinds
            raise PlanError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}") from None

    def _session(self, path: Path, *, graphs: bool) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        provider = {
            "device_id": str(self._device.ordinal),
            "user_compute_stream": str(self._device.stream_handle),
            "use_tf32": "0",  # float32 is float32
            "arena_extend_strategy": "kSameAsRequested",  # engines have arenas of their own: powers of two add up
        }
        if graphs:
            provider["enable_cuda_graph"] = "1"
        return ort.InferenceSession(str(path), options, providers=[(_PROVIDER, provider)], enable_fallback=0)


class DeviceEngine:
    """An ONNX Runtime session whose tensors lie at addresses of a place: ("cuda", ordinal). It records itself if it
    has a `thread` to run in.

    Raises `PlanError` if the session reads or writes some of its tensors elsewhere.
    """

    def __init__(
        self, session: ort.InferenceSession, engine: Engine, place: tuple[str, int], thread: OneThread | None = None
    ) -> None:
        _check_placement(session, engine, place)
        self._session, self._engine, self._place = session, engine, place
        self._graphs = _Graphs(engine.file, thread)
        self._bound = WeakValueDictionary[tuple[object, ...], _BoundEngine]()

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        """Programs that run it on the same tensors share what it records of them."""
        assert isinstance(buffers, DeviceBuffers)
        key = (id(buffers), *sorted(bound.items()))  # it keeps the buffers alive
        found = self._bound.get(key)
        if found is None:
            found = _BoundEngine(self._session, self._engine, buffers, bound, self._place, self._graphs)
            self._bound[key] = found
        return found


def _check_placement(session: ort.InferenceSession, engine: Engine, place: tuple[str, int]) -> None:
    """ONNX Runtime copies an input that it reads elsewhere when the input is bound, and never again: bindings are kept,
    so that later runs would read what was there once."""
    tensors = (*session.get_inputs(), *session.get_outputs())
    infos = (*session.get_input_memory_infos(), *session.get_output_memory_infos())
    own, _ = place
    if elsewhere := [tensor.name for tensor, info in zip(tensors, infos, strict=True) if info.name.lower() != own]:
        raise PlanError(
            f"{engine.file}: ONNX Runtime {ort.__version__} keeps {', '.join(elsewhere)} elsewhere than on the device "
            f"({own}), where it would not see new values; build the plan again with this version of Outrider"
        )


class _Graphs:
    """Recordings of an engine, of all sessions, and the `thread` that does. An id is never used again."""

    def __init__(self, engine: str, thread: OneThread | None) -> None:
        self._engine, self.thread = engine, thread
        self._ids = iter(range(MOST_GRAPHS))
        self._told = False

    def next(self) -> int | None:
        """An id for addresses and sizes that come again; None where there is none."""
        found = None if self.thread is None else next(self._ids, None)
        if found is None and self.thread is not None and not self._told:
            self._told = True
            _LOG.warning(
                "%s has recorded %d sizes of step in all sessions, the most that it may: further ones are launched "
                "kernel by kernel; open fewer sessions at a time: what a closed one has recorded is for the next",
                self._engine, MOST_GRAPHS,
            )  # fmt: skip
        return found


@dataclass(frozen=True)
class _Bound:
    """An engine's tensor at its address; of its `shape`, what is no number is the place of a symbol's size."""

    name: str
    address: int
    element_type: Any
    shape: tuple[tuple[int, int | None], ...]  # a number, or the place of a size

    @classmethod
    def from_tensor(cls, tensor: Tensor, memory: Memory) -> _Bound:
        shape = list[tuple[int, int | None]]()
        for axis, dim in enumerate(tensor.shape):
            if dim == names.CAPACITY:
                shape.append((memory.shape[axis], None))  # of the cache that is bound
            else:
                shape.append((dim, None) if isinstance(dim, int) else (0, names.SYMBOLS.index(dim)))
        element_type = _BFLOAT16 if tensor.dtype is DType.BFLOAT16 else np.dtype(tensor.dtype.numpy).type
        return cls(tensor.name, memory.address, element_type, tuple(shape))

    def shape_of(self, sizes: Sequence[int]) -> list[int]:
        return [number if symbol is None else sizes[symbol] for number, symbol in self.shape]


class _BoundEngine:
    def __init__(
        self,
        session: ort.InferenceSession,
        engine: Engine,
        buffers: DeviceBuffers,
        bound: dict[str, str],
        place: tuple[str, int],
        graphs: _Graphs,
    ) -> None:
        self._session, self._place, self._buffers = session, place, buffers
        self._file = engine.file
        self._inputs, self._outputs = (
            [_Bound.from_tensor(tensor, buffers.memory[bound[tensor.name]]) for tensor in tensors]
            for tensors in (engine.inputs, engine.outputs)
        )
        self._graphs = graphs
        self._recorded: dict[tuple[int, ...], _Ready] = {}
        self._plain: OrderedDict[tuple[int, ...], _Ready] = OrderedDict()  # used last comes last

    def __call__(self, sizes: list[int]) -> None:
        key = tuple(sizes)
        try:
            binding, options = self._recorded.get(key) or self._ready(key)
            run = partial(self._session.run_with_iobinding, binding, options)
            if self._graphs.thread is None:
                run()
            else:
                self._graphs.thread.run(run)
        except Exception as error:  # ONNX Runtime raises plain Exceptions of its own kinds
            raise PlanError(f"{self._file} failed on the GPU: {error}") from None

    def _ready(self, sizes: tuple[int, ...]) -> _Ready:
        """The run of the engine with `sizes`: recorded by its first run, if sizes like these come again."""
        if self._buffers.recording and (graph := self._graphs.next()) is not None:
            self._recorded[sizes] = self._bind(sizes), _run_options(str(graph))
            return self._recorded[sizes]
        ready = self._plain.pop(sizes, None) or (self._bind(sizes), _run_options(_NO_GRAPH))
        self._plain[sizes] = ready
        if len(self._plain) > _MOST_BOUND:
            self._plain.popitem(last=False)
        return ready

    def _bind(self, sizes: tuple[int, ...]) -> ort.IOBinding:
        binding = self._session.io_binding()
        for tensors, bind in ((self._inputs, binding.bind_input), (self._outputs, binding.bind_output)):
            for tensor in tensors:
                bind(tensor.name, *self._place, tensor.element_type, tensor.shape_of(sizes), tensor.address)
        return binding


def _run_options(graph: str) -> ort.RunOptions:
    options = ort.RunOptions()
    # The program waits once, after its last stage.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


DRIVER = Driver(reason_against, OnnxRuntimeCuda)
