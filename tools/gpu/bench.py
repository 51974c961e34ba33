"""What stages measure with: a device with the kernels of a cubin, models on it, times of recorded launches."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_uint64
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans import names
from plans.kernel_costs import LaunchCost, launch_costs
from plans.kernel_engine import Place
from runtime.backends.cuda_driver import CudaDevice, call
from runtime.backends.kernel_engines import Call, calls
from tools.gpu.golden import Array, Golden
from tools.gpu.step_model import StepModel, made_up

Row = dict[str, Any]
Step = list[tuple[LaunchCost, Call]]
_FILL_BLOCKS, _FILL_THREADS = 2048, 256


@dataclass(frozen=True)
class Settings:
    """What is measured: bytes of the copies, of the reads and of what clears the L2 cache, empty kernels in a row, new
    tokens of a step, keys in view, how often each time is taken, and from how many bytes on a launch reads no L2."""

    copy_bytes: int = 1 << 30
    read_bytes: int = 4 << 30
    flush_bytes: int = 256 << 20
    past_cache: int = 150_000_000
    empty: int = 1000
    rows: tuple[int, ...] = (1, 8, 32)
    keys: int = 512
    step_repeats: int = 24
    kernel_repeats: int = 10
    new_tokens: int = 96

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Settings:
        given = json.loads(path.read_text(encoding="utf-8"))
        return Settings(**{**given, "rows": tuple(given["rows"])})


class Bench:
    """`prepared` is the folder that `tools.gpu.prepare` wrote, `out` the one of results. `keep` keeps a row at once."""

    def __init__(self, prepared: Path, out: Path, keep: Callable[[Row], None], report: Mapping[str, Any]) -> None:
        self.prepared, self.out, self.keep, self.report = prepared, out, keep, report
        self.settings = Settings.read(prepared / "settings.json")

    @cached_property
    def engine(self) -> CudaDevice:
        return self.device(self.prepared / "engine.sm_90.cubin")

    @cached_property
    def probe(self) -> CudaDevice:
        return self.device(self.prepared / "probe.sm_90.cubin")

    @cached_property
    def scratch(self) -> int:
        """The address of what is overwritten to clear the L2 cache."""
        return self.engine.allocate(self.settings.flush_bytes)

    def device(self, cubin: Path) -> CudaDevice:
        """Return a device with the kernels of a cubin, which may be compressed."""
        device = CudaDevice()
        with TemporaryDirectory() as folder:
            plain = Path(folder) / "cubin"
            plain.write_bytes(lzma.decompress(cubin.read_bytes()) if cubin.suffix == ".xz" else cubin.read_bytes())
            device.load_kernels(plain)
        return device

    def models(self) -> dict[str, StepModel]:
        """Return the prepared models by name, such as 8b.int4; the small ones come first."""
        paths = sorted((self.prepared / "engines").glob("*.json"))
        return {path.stem: StepModel.model_validate_json(path.read_bytes()) for path in paths}

    def speed(self, kind: str = "copy") -> float | None:
        """Return GB/s of copies or reads, where the stage `env` has measured them."""
        rows = self.report["stages"].get("env", {}).get("rows", [])
        return next((row["gb_s"] for row in rows if row.get("what") == kind), None)

    def rate(self, moved: int, ms: float) -> Row:
        """Return GB/s and the share of the speed of copies."""
        found, copies = moved / ms / 1e6, self.speed()
        return {"gb_s": round(found, 1), "share": round(found / copies, 4) if copies else None}


def upload(device: CudaDevice, address: int, array: Array) -> None:
    landing = device.pinned(array.nbytes).array(0, (array.nbytes,), np.uint8)
    landing[:] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    with device.lock():
        device.to_device(address, landing.ctypes.data, array.nbytes)
    device.wait()


def download(device: CudaDevice, address: int, like: Array) -> Array:
    landing = device.pinned(like.nbytes).array(0, (like.nbytes,), np.uint8)
    with device.lock():
        device.to_host(landing.ctypes.data, address, like.nbytes)
    device.wait()
    return landing.view(like.dtype).reshape(like.shape).copy()


def launch(device: CudaDevice, kernel: str, blocks: int, threads: int, *values: int) -> None:
    with device.lock():
        device.launch(kernel, blocks, threads, [c_int64(value) for value in values])


def run_golden(device: CudaDevice, case: Golden) -> list[Array | None]:
    """Launch a golden launch, and return what its tensors have become."""
    addresses = [0 if each is None else device.allocate(each.nbytes) for each in case.before]
    for address, array in zip(addresses, case.before, strict=True):
        if array is not None and array.nbytes:
            upload(device, address, array)
    values = [*map(c_uint64, addresses), *map(c_int64, case.numbers)]
    with device.lock():
        device.launch(case.kernel, case.blocks, case.threads, values, case.shared)
    found = [
        None if array is None else download(device, address, array)
        for address, array in zip(addresses, case.before, strict=True)
    ]
    for address in filter(None, addresses):
        device.free(address)
    return found


def times(
    device: CudaDevice, enqueue: Callable[[], object], repeats: int, flush: tuple[int, int] = (0, 0)
) -> list[float]:
    """Return milliseconds of what `enqueue` launches, recorded as a graph, for each of `repeats` replays.

    Replays follow each other at once, so that the host's time is not in them. Before each, `flush[1]` bytes at
    `flush[0]` are overwritten, which takes the L2 cache.
    """
    with device.lock():
        enqueue()  # kernels are loaded, and have leave for their shared memory
    device.wait()
    with device.lock():
        device.begin_recording()
        enqueue()
        graph = device.end_recording()
        device.replay(graph)
        marks = []
        for _ in range(repeats):
            if flush[1]:
                call("cuMemsetD8Async", flush[0], 1, flush[1], device.stream)
            begun = device.timed_mark()
            device.replay(graph)
            marks.append((begun, device.timed_mark()))
    found = [device.milliseconds(*pair) for pair in marks]
    device.discard(graph)
    return found


class LoadedModel:
    """A model whose weights and caches lie on the device, made up there; every part of its workspace lies apart when
    `apart`, so that any launch can be run again."""

    def __init__(self, bench: Bench, model: StepModel, apart: bool = False) -> None:
        self._device, self._model = bench.engine, model
        self._seeds, self._probe, self._held = count(1), bench.probe, list[int]()
        self._most = model.sizes(max(bench.settings.rows), bench.settings.keys)
        engine, weights = model.engine, self._allocate(model.weights_size)
        self.addresses = {name: weights + place.offset for name, place in engine.constants.items()}
        for name, (kind, numbers) in made_up(engine).items():
            self._fill(kind, self.addresses[name], engine.constants[name].size, *numbers)
        workspace = self._places(engine.workspace, engine.workspace_size, apart)
        self.addresses |= workspace | self._places(engine.counters, engine.counters_size, False)
        for tensor in model.tensors:
            size = tensor.bytes(self._most)
            self.addresses[tensor.name] = self._allocate(size)
            if tensor.name.startswith(("k_cache", "v_cache")):
                kind, numbers = (
                    ("reals", ()) if tensor.dtype == "float32" else ("halves", (1 + (tensor.dtype == "bfloat16"),))
                )
                self._fill(kind, self.addresses[tensor.name], size, *numbers)
        self._probe.wait()
        for name in model.values:
            upload(self._device, self.addresses[name], model.value(name))

    def _allocate(self, size: int) -> int:
        address = self._device.allocate(size)
        self._held.append(address)
        return address

    def _places(self, places: Mapping[str, Place], size: int, apart: bool) -> dict[str, int]:
        if apart:
            return {name: self._allocate(place.size) for name, place in places.items()}
        first = self._allocate(size)
        return {name: first + place.offset for name, place in places.items()}

    def _fill(self, kind: str, address: int, size: int, *numbers: int) -> None:
        self._device.wait()  # for the zeros that memory has first
        launch(
            self._probe, f"probe_fill_{kind}", min(_FILL_BLOCKS, -(-size // 1024)), _FILL_THREADS, address, size,
            next(self._seeds), *numbers,
        )  # fmt: skip

    def step(self, rows: int) -> Step:
        """Return the launches of a step of `rows` new tokens, each after the last, all keys in view of each other."""
        sizes = self._model.sizes(rows, keys := self._most[names.VIEW])
        given: dict[str, NDArray[np.int64]] = {
            names.TOKEN_IDS: 37 * np.arange(rows) % 64,
            names.POSITIONS: keys - rows + np.arange(rows),
            names.PAST_LENGTH: np.array([keys - rows]),
            names.LOGIT_INDICES: np.arange(rows),
        }
        for name, numbers in given.items():
            upload(self._device, self.addresses[name], numbers.astype(np.int64))
        engine = self._model.engine
        return list(zip(launch_costs(engine, sizes), calls(engine, self.addresses, sizes), strict=True))

    def close(self) -> None:
        self._device.wait()
        for address in self._held:
            self._device.free(address)

    def __enter__(self) -> LoadedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def enqueue_all(device: CudaDevice, launches: Sequence[Call]) -> Callable[[], None]:
    def enqueue() -> None:
        for each in launches:
            device.launch(each.kernel, each.blocks, each.threads, each.values, each.shared)

    return enqueue
