"""Engines of the backend `cuda`: lists of kernel launches, on any device that launches them (`device_contract.py`)."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from outrider.plans import names
from outrider.plans.errors import PlanError
from outrider.plans.formulas import Formula, formula
from outrider.plans.kernel_engine import NO_TENSOR, TURN, KernelEngine, Launch, problems
from outrider.plans.manifest import BackendPlan, Engine
from outrider.plugins.cuda.engine_kernels import PARAMETERS
from outrider.runtime.backends.base import BoundEngine
from outrider.runtime.backends.device import DeviceBuffers
from outrider.runtime.backends.device_contract import Device
from outrider.runtime.execution.buffers import Buffers

_MOST_RESOLVED = 64  # sizes of plain steps whose launches are kept
_UPLOAD = 64 * 2**20  # bytes of weights that go to the device at once
_Number = ctypes.c_uint64 | ctypes.c_int64


@dataclass(frozen=True)
class Call:
    """A launch with the addresses and the numbers of one step."""

    kernel: str
    blocks: int
    threads: int
    values: Sequence[_Number]
    shared: int


class KernelEngines:
    """The engines of one plan on one device: what they share. Weights are there once for all sessions."""

    def __init__(self, plan: BackendPlan, device: Device) -> None:
        self._plan, self._device = plan, device
        self._weights: dict[Path, int] = {}
        self._allocated = list[int]()
        finalize(self, _free, device, self._allocated).atexit = False
        self.workspace = 0
        """Bytes that the largest of them needs, and all of a session share."""

    def load(self, path: Path, engine: Engine) -> LoadedKernels:
        """Load an engine. Raises `PlanError` where its file is damaged."""
        name = next(name for name, each in self._plan.engines.items() if each is engine or each.file == engine.file)
        try:
            content = KernelEngine.model_validate_json(path.read_bytes())
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error}; build the plan again") from None
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise PlanError(f"{path} is no list of kernels: {', '.join(faults[:4])}; build the plan again") from None
        weights = path.parent / content.weights
        try:
            data = np.memmap(weights, np.uint8, "r") if weights.stat().st_size else np.zeros(0, np.uint8)
        except OSError as error:
            raise PlanError(f"{weights} cannot be read: {error}; build the plan again") from None
        bound = {tensor.name for tensor in (*engine.inputs, *engine.outputs)}
        for problem in problems(content, bound, self._plan.symbols[name], data.nbytes, PARAMETERS):
            raise PlanError(f"{path}: {problem}; build the plan again")
        self.workspace = max(self.workspace, content.workspace_size)
        return LoadedKernels(self, engine, content, self._upload(weights, data))

    def _upload(self, path: Path, data: NDArray[np.uint8]) -> int:
        """Return the address of a file of weights on the device."""
        if path not in self._weights:
            size = data.nbytes
            try:
                address = self._device.allocate(size)
            except PlanError as error:
                raise PlanError(
                    f"{path}: the weights need {size / 1e9:.1f} GB on the GPU, more than there is ({error}); quantise "
                    "them further, or choose a smaller model"
                ) from None
            self._allocated.append(address)
            landing = self._device.pinned(min(size, _UPLOAD)).array(0, (min(size, _UPLOAD),), np.uint8)
            for start in range(0, size, _UPLOAD):
                part = landing[: min(size - start, _UPLOAD)]
                part[:] = data[start : start + _UPLOAD]
                with self._device.lock():
                    self._device.to_device(address + start, part.ctypes.data, part.nbytes)
                    there = self._device.mark()
                self._device.wait_for(there)
            self._weights[path] = address
        return self._weights[path]


def _free(device: Device, addresses: Sequence[int]) -> None:
    for address in addresses:
        device.free(address)


class LoadedKernels:
    """An engine whose weights are on the device."""

    def __init__(self, engines: KernelEngines, engine: Engine, content: KernelEngine, weights: int) -> None:
        self._engines, self._engine, self._content, self._weights = engines, engine, content, weights

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        assert isinstance(buffers, DeviceBuffers)
        content = self._content
        workspace = buffers.workspace("engines", self._engines.workspace, False)
        counters = buffers.workspace(f"counters of {self._engine.file}", content.counters_size, True)
        addresses = {NO_TENSOR: 0}
        for places, first in (
            (content.constants, self._weights),
            (content.workspace, workspace),
            (content.counters, counters),
        ):
            addresses |= {name: first + place.offset for name, place in places.items()}
        addresses |= {name: buffers.memory[buffer].address for name, buffer in bound.items()}
        capacity = next((buffers.memory[bound[n]].shape[2] for n in bound if n == names.k_cache(0)), 0)
        return BoundKernels(self._engines, buffers.device, content, addresses, capacity)


class BoundKernels:
    """Called with the device's lock held: launches every kernel with the sizes of the step."""

    def __init__(
        self, engines: KernelEngines, device: Device, content: KernelEngine, addresses: Mapping[str, int], capacity: int
    ) -> None:
        self._engines = engines  # whose weights stay as long as it
        self._device, self._capacity = device, capacity
        self._items = _resolve(content, addresses)
        self._calls: OrderedDict[tuple[int, ...], list[Call]] = OrderedDict()  # used last comes last

    def __call__(self, sizes: list[int]) -> None:
        for call in self._of(tuple(sizes)):
            self._device.launch(call.kernel, call.blocks, call.threads, call.values, call.shared)

    def _of(self, sizes: tuple[int, ...]) -> list[Call]:
        calls = self._calls.pop(sizes, None)
        if calls is None:
            at = dict(zip(names.SYMBOLS, sizes, strict=True)) | {names.CAPACITY: self._capacity}
            calls = _calls(self._items, at)
            if len(self._calls) == _MOST_RESOLVED:
                self._calls.popitem(last=False)
        self._calls[sizes] = calls
        return calls


class _Resolved:
    """A launch whose tensors have addresses."""

    def __init__(self, launch: Launch, addresses: Mapping[str, int]) -> None:
        self._kernel, self._threads = launch.kernel, launch.threads
        self._pointers = [ctypes.c_uint64(addresses[name]) for name in launch.tensors]
        self._numbers: list[Formula] = [formula(text) for text in launch.numbers]
        self._blocks, self._shared = formula(launch.blocks), formula(launch.shared)

    def call(self, sizes: Mapping[str, int]) -> Call:
        numbers = [ctypes.c_int64(number.value(sizes)) for number in self._numbers]
        blocks, shared = self._blocks.value(sizes), self._shared.value(sizes)
        if blocks < 0:
            raise PlanError(f"{self._kernel}: {self._blocks.text!r} blocks are {blocks}; build the plan again")
        return Call(self._kernel, blocks, self._threads, [*self._pointers, *numbers], shared)


def calls(content: KernelEngine, addresses: Mapping[str, int], sizes: Mapping[str, int]) -> list[Call]:
    """Return the launches of a step, in order; those of no blocks are left out.

    `addresses` are those of all tensors that launches name, `sizes` the step's by symbol.
    """
    return _calls(_resolve(content, {NO_TENSOR: 0, **addresses}), sizes)


def _resolve(content: KernelEngine, addresses: Mapping[str, int]) -> list[tuple[Formula, list[_Resolved]]]:
    return [
        (formula("1"), [_Resolved(item, addresses)])
        if isinstance(item, Launch)
        else (formula(item.times), [_Resolved(launch, addresses) for launch in item.launches])
        for item in content.items
    ]


def _calls(items: Sequence[tuple[Formula, Sequence[_Resolved]]], sizes: Mapping[str, int]) -> list[Call]:
    return [
        call
        for times, launches in items
        for turn in range(times.value(sizes))
        for launch in launches
        if (call := launch.call({**sizes, TURN: turn})).blocks
    ]
