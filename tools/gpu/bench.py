"""What stages measure with: kernels on a device, models whose weights are made up there, times of recorded launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_uint64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.kernel_costs import LaunchCost, launch_costs
from plans.kernel_engine import Place
from runtime.backends.cuda_driver import CudaDevice, call
from runtime.backends.kernel_engines import Call, calls
from tools.gpu.golden import Array, Golden
from tools.gpu.step_model import FILLS, StepModel, made_up

Step = list[tuple[LaunchCost, Call]]


@dataclass(frozen=True)
class Settings:
    """Bytes that are copied and read, new tokens of each step, keys in view, and replays for a time."""

    bytes: int = 1 << 30
    rows: Sequence[int] = (1, 8, 32, 512)
    keys: int = 512
    repeats: int = 24


def upload(device: CudaDevice, address: int, array: Array) -> None:
    landing = device.pinned(array.nbytes).array(0, array.shape, array.dtype)
    landing[...] = array
    with device.lock():
        device.to_device(address, landing.ctypes.data, array.nbytes)
    device.wait()


def download(device: CudaDevice, address: int, like: Array) -> Array:
    landing = device.pinned(like.nbytes).array(0, like.shape, like.dtype)
    with device.lock():
        device.to_host(landing.ctypes.data, address, like.nbytes)
    device.wait()
    return landing.copy()


def run_golden(device: CudaDevice, case: Golden) -> list[Array | None]:
    """Launch a golden launch, and return its tensors afterwards."""
    addresses = [0 if each is None else device.allocate(each.nbytes) for each in case.before]
    both = list(zip(addresses, case.before, strict=True))
    for address, array in both:
        if array is not None:
            upload(device, address, array)
    values = [*map(c_uint64, addresses), *map(c_int64, case.numbers)]
    with device.lock():
        device.launch(case.kernel, case.blocks, case.threads, values, case.shared)
    return [None if array is None else download(device, address, array) for address, array in both]


def enqueue_all(device: CudaDevice, step: Sequence[Call]) -> None:
    for each in step:
        device.launch(each.kernel, each.blocks, each.threads, each.values, each.shared)


def times(device: CudaDevice, step: Sequence[Call], repeats: int, cleared: int = 0) -> list[float]:
    """Return milliseconds of launches, recorded as a graph, for each of `repeats` replays.

    Replays follow each other at once, so that the host's time is not in them. Before each, `cleared` bytes elsewhere
    are overwritten, which evicts the L2 cache.
    """
    elsewhere = device.allocate(cleared)
    with device.lock():
        enqueue_all(device, step)  # loads the kernels, and sets the limits of their shared memory
        device.begin_recording()
        enqueue_all(device, step)
        graph = device.end_recording()
        device.replay(graph)
        marks = []
        for _ in range(repeats):
            if cleared:
                call("cuMemsetD8Async", elsewhere, 1, cleared, device.stream)
            begun = device.timed_mark()
            device.replay(graph)
            marks.append((begun, device.timed_mark()))
    found = [device.milliseconds(*pair) for pair in marks]
    device.discard(graph)
    device.free(elsewhere)
    return found


def copy_speed(device: CudaDevice, settings: Settings) -> float:
    """Return GB/s, read and written, of copies one after another; in a graph they are slower."""
    source, to = device.allocate(settings.bytes), device.allocate(settings.bytes)
    with device.lock():
        device.copy(to, source, settings.bytes)
        begun = device.timed_mark()
        for _ in range(settings.repeats):
            device.copy(to, source, settings.bytes)
        ms = device.milliseconds(begun, device.timed_mark())
    return 2e-6 * settings.bytes * settings.repeats / ms


class LoadedModel:
    """A model whose weights and caches lie on the device, made up."""

    def __init__(self, device: CudaDevice, model: StepModel, settings: Settings) -> None:
        self._device, self._model = device, model
        self._most, engine = model.sizes(max(settings.rows), settings.keys), model.engine
        addresses = self._places(engine.constants, model.weights_size)
        fills = {name: (engine.constants[name].size, fill) for name, fill in made_up(engine).items()}
        addresses |= self._places(engine.counters, engine.counters_size)
        for tensor in model.tensors:
            size = tensor.elements(self._most) * tensor.dtype.itemsize
            addresses[tensor.name] = device.allocate(size)
            if tensor.name.startswith(("k_cache", "v_cache")):
                fills[tensor.name] = size, FILLS[tensor.dtype]
        for fill in {fill for _, fill in fills.values()}:
            words = fill.words(settings.bytes >> 6)
            upload(device, pattern := device.allocate(words.nbytes), words)
            with device.lock():
                for name in (name for name, (_, own) in fills.items() if own == fill):
                    for at in range(0, size := fills[name][0], words.nbytes):
                        device.copy(addresses[name] + at, pattern, min(words.nbytes, size - at))
        for name, value in model.values.items():
            upload(device, addresses[name], np.frombuffer(value, np.uint8))
        self._as_planned = addresses | self._places(engine.workspace, engine.workspace_size)
        self._apart = addresses | {name: device.allocate(place.size) for name, place in engine.workspace.items()}

    def _places(self, places: Mapping[str, Place], size: int) -> dict[str, int]:
        first = self._device.allocate(size)
        return {name: first + place.offset for name, place in places.items()}

    def step(self, rows: int, *, apart: bool) -> Step:
        """Return the launches of a step of `rows` new tokens, each after the last, all keys in view of each other.

        Where they are `apart`, no two share workspace: after a whole step, each can be run again by itself.
        """
        sizes = self._model.sizes(rows, keys := self._most[names.VIEW])
        engine, addresses = self._model.engine, self._apart if apart else self._as_planned
        given: dict[str, NDArray[np.int64]] = {
            names.TOKEN_IDS: 37 * np.arange(rows) % 64,
            names.POSITIONS: keys - rows + np.arange(rows),
            names.PAST_LENGTH: np.array([keys - rows]),
            names.LOGIT_INDICES: np.arange(rows),
        }
        for name, numbers in given.items():
            upload(self._device, addresses[name], numbers.astype(np.int64))
        return list(zip(launch_costs(engine, sizes), calls(engine, addresses, sizes), strict=True))
