"""The embedded default: ONNX Runtime on the CPU, every tensor bound once to the session's buffers.

Only tensors whose size changed since the last step are bound again, as values that are kept by size: to make one, or to
bind by address, takes five times as long.
Cache outputs are bound to the memory of their inputs, so attention appends in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

from outrider.plans import names
from outrider.plans.buffers import DType, Tensor
from outrider.plans.errors import PlanError
from outrider.plans.manifest import BackendPlan, Engine
from outrider.plans.onnx_operators import check_operators
from outrider.plugins.onnxruntime_ops import THREADS, cpu_library
from outrider.runtime.backends.base import BoundEngine, Driver, LoadedEngine, Settings
from outrider.runtime.backends.shared_engines import write_packed
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.kv.memory import KvMemory, host_kv

Array = NDArray[Any]

_ONNX_NAMES = {DType.FLOAT32: "float", DType.FLOAT64: "double"}
_KEPT_VALUES = 256  # of a tensor
# Makes one Split of the Gathers that pick a draft's levels out of one tensor: a Split here is slower than all of them.
_DISABLED = ["GatherSliceToSplitFusion"]
CACHED_BYTES = 16 << 20  # bytes of weights up to which an engine runs on the calling thread alone


class OnnxRuntimeCpu:
    """Where `threads` of the settings is 0, ONNX Runtime chooses: one per physical core.

    Every engine has worker threads of its own, which spin for a while when it has run: between two steps the host works
    for some 50 us, and workers that have gone to sleep by then cost more to wake. But they share the cores with the
    engine that runs meanwhile. So a drafter has none where its weights stay in a core's caches, and else none that
    spin: measured on two cores, a target's pass after a drafter that does takes 1.4 times as long.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        check_operators(path)
        if self._settings.shared_engines is not None:
            write = partial(write_packed, options=partial(self._options, engine), disabled=_DISABLED)
            path = self._settings.shared_engines.engine(path, engine.weight_bytes, write)
        try:
            session = ort.InferenceSession(
                str(path), self._options(engine), providers=["CPUExecutionProvider"], disabled_optimizers=_DISABLED
            )
        except Exception as error:  # ONNX Runtime raises bare RuntimeErrors of its own kinds
            raise PlanError(f"{path} cannot be loaded by ONNX Runtime {ort.__version__}: {error}") from None
        _check_signature(path, "inputs", session.get_inputs(), engine.inputs)
        _check_signature(path, "outputs", session.get_outputs(), engine.outputs)
        return _LoadedEngine(session, engine)

    def kv_memory(self, planes: int, heads: int, slots: int, size: int, dtype: DTypeLike) -> KvMemory:
        return host_kv(planes, heads, slots, size, dtype, huge_pages=not self._settings.share_memory)

    def buffers(self, plan: BackendPlan) -> Buffers:
        return Buffers(plan, huge_pages=not self._settings.share_memory)

    def _options(self, engine: Engine) -> ort.SessionOptions:
        small, drafts = engine.weight_bytes <= CACHED_BYTES, any(t.name == names.TREE_TOKEN_IDS for t in engine.outputs)
        options = session_options(1 if small and drafts else self._settings.threads)
        if drafts:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        else:
            options.add_session_config_entry("session.intra_op.spin_duration_us", "2000")
            options.add_session_config_entry("session.intra_op.spin_backoff_max", "1")
        return options


def session_options(threads: int) -> ort.SessionOptions:
    """Options of a session that knows our ops; `threads` 0 leaves the number to ONNX Runtime."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # warnings about our own graphs help no user; errors are raised
    options.intra_op_num_threads = threads
    if threads:
        options.add_session_config_entry(THREADS, str(threads))
    options.register_custom_ops_library(str(cpu_library()))
    return options


class _LoadedEngine:
    def __init__(self, session: ort.InferenceSession, engine: Engine) -> None:
        self._session, self._engine = session, engine

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        tensors = {name: buffers.arrays[buffer] for name, buffer in bound.items()}
        return _BoundEngine(self._session, self._engine, tensors)


class _Sized:
    """A tensor whose shape has symbols: where it lies, and its values at sizes that it has had."""

    def __init__(self, tensor: Tensor, array: Array, bind: Any) -> None:
        self._shape = tuple(
            size if d == names.CAPACITY else d for d, size in zip(tensor.shape, array.shape, strict=True)
        )
        self.symbols = frozenset(names.SYMBOLS.index(d) for d in self._shape if isinstance(d, str))
        self._of = sorted(self.symbols)
        self._name, self._memory, self._bind = tensor.name, array.reshape(-1), bind
        self._values: dict[tuple[int, ...], ort.OrtValue] = {}

    def bind(self, sizes: list[int]) -> None:
        key = tuple([sizes[symbol] for symbol in self._of])
        value = self._values.get(key)
        if value is None:
            if len(self._values) == _KEPT_VALUES:
                self._values.clear()
            shape = [sizes[names.SYMBOLS.index(d)] if isinstance(d, str) else d for d in self._shape]
            value = ort.OrtValue.ortvalue_from_numpy(self._memory[: prod(shape)].reshape(shape))
            self._values[key] = value
        self._bind(self._name, value)


class _BoundEngine:
    def __init__(self, session: ort.InferenceSession, engine: Engine, tensors: Mapping[str, Array]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._keep = [tensors[t.name] for t in (*engine.inputs, *engine.outputs)]  # addresses must stay valid
        self._sized: list[_Sized] = []
        self._sizes = [-1] * len(names.SYMBOLS)
        for group, bind in (
            (engine.inputs, self._binding.bind_ortvalue_input),
            (engine.outputs, self._binding.bind_ortvalue_output),
        ):
            for tensor in group:
                array = tensors[tensor.name]
                _check(tensor, array)
                sized = _Sized(tensor, array, bind)
                if sized.symbols:
                    self._sized.append(sized)
                else:
                    sized.bind([])

    def __call__(self, sizes: list[int]) -> None:
        if sizes != self._sizes:
            changed = {i for i, (new, old) in enumerate(zip(sizes, self._sizes, strict=True)) if new != old}
            for tensor in self._sized:
                if tensor.symbols & changed:
                    tensor.bind(sizes)
            self._sizes = sizes.copy()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime raises plain Exceptions of its own kinds
            raise PlanError(f"an engine of the plan failed: {error}; build the plan again") from None


def _check_signature(path: Path, kind: str, nodes: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """The memory that a tensor is bound to was measured by the plan's word, so the graph must agree with it."""
    found = {node.name: (node.type, tuple(node.shape)) for node in nodes}
    listed = {t.name: (f"tensor({_ONNX_NAMES.get(t.dtype, t.dtype)})", t.shape) for t in tensors}
    if found != listed:
        different = sorted(name for name in found.keys() | listed.keys() if found.get(name) != listed.get(name))
        raise PlanError(
            f"{path} has other {kind} than the plan says: {different[0]!r} is {found.get(different[0])}, the plan has "
            f"{listed.get(different[0])}; build the plan again"
        )


def _check(tensor: Tensor, array: Array) -> None:
    """A tensor may be shorter than its buffer in the first dimension: it lies at the start."""
    fits = len(array.shape) == len(tensor.shape) and all(
        isinstance(d, str) or d == size or (d < size and index == 0)
        for index, (d, size) in enumerate(zip(tensor.shape, array.shape, strict=True))
    )
    if array.dtype != np.dtype(tensor.dtype.numpy) or not fits or not array.flags.c_contiguous:
        raise PlanError(
            f"engine tensor {tensor.name!r} wants contiguous {tensor.dtype} {tensor.shape}, its buffer is "
            f"{array.dtype} {array.shape}; build the plan again"
        )


DRIVER = Driver(lambda plan: None, lambda plan, settings: OnnxRuntimeCpu(settings))
