"""The stages of `measure`: `python -m outrider.tools.lab.gpu.stages NAME PREPARED OUT` runs one in this process.

Each row that it finds is a line of OUT/NAME.jsonl at once. A row that has `passed` false makes the stage fail. What
`prepare` writes for stages has its form here: golden launches of kernels, steps of models, runs of drafters.
"""

from __future__ import annotations

import json
import lzma
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_uint64
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from outrider import Generation, Runtime, Session
from outrider.plans import names
from outrider.plans.buffers import Strict, Tensor
from outrider.plans.kernel_costs import LaunchCost, launch_costs
from outrider.plans.kernel_engine import KernelEngine
from outrider.plugins.cuda.engine_kernels import ENGINE_KERNELS
from outrider.runtime.backends.cuda_driver import CudaDevice, call, driver_version
from outrider.runtime.backends.kernel_engines import Call, calls
from outrider.runtime.backends.recorder import Recorder

Array = NDArray[Any]
Tensors = Sequence[Array | None]
Row = dict[str, Any]
Step = list[tuple[LaunchCost, Call]]

_NODES = 1000  # of the graph of kernels that do nothing
_PAST_CACHE = 150_000_000  # bytes of launches that evict the L2 cache themselves


class Bench:
    """The folder that `tools.lab.gpu.prepare` filled, whose kernels are measured, and how a row is kept."""

    def __init__(self, prepared: Path, keep: Callable[[Row], None]) -> None:
        self.prepared, self.keep, self.device = prepared, keep, CudaDevice()
        self.settings = json.loads((prepared / "settings.json").read_text(encoding="utf-8"))
        (cubin,) = prepared.glob("cubins/*.engine.*.cubin")
        self.device.load_kernels(cubin)

    def enqueue(self, launches: Sequence[Call]) -> None:
        with self.device.lock():
            for each in launches:
                self.device.launch(each.kernel, each.blocks, each.threads, each.values, each.shared)

    def times(self, run: Callable[[], object], cleared: int = 0) -> list[float]:
        """Return the device's milliseconds for what `run` enqueues, for each run after the first.

        They follow each other at once, so that the host's time is not in them. Before each, `cleared` bytes elsewhere
        are overwritten, which evicts the L2 cache.
        """
        device, marks = self.device, []
        elsewhere = device.allocate(cleared)
        with device.lock():
            run()
            for _ in range(self.settings["repeats"]):
                if cleared:
                    call("cuMemsetD8Async", elsewhere, 1, cleared, device.stream)
                begun = device.timed_mark()
                run()
                marks.append((begun, device.timed_mark()))
        found = [device.milliseconds(*pair) for pair in marks]
        device.free(elsewhere)
        return found

    def graph_times(self, launches: Sequence[Call], cleared: int = 0) -> list[float]:
        """Return the same of launches that are recorded as one graph."""
        recorder = Recorder(self.device)
        recorder.recording = True
        run = recorder.stretch([partial(self.enqueue, launches)], [])
        with self.device.lock():
            run()
        found = self.times(run, cleared)
        recorder.clear()
        return found

    def copy_speed(self) -> float:
        """Return GB/s, read and written, of copies one after another; in a graph they are slower."""
        size: int = self.settings["bytes"]
        source, to = self.device.allocate(size), self.device.allocate(size)
        return 2e-6 * size / median(self.times(lambda: self.device.copy(to, source, size)))


@dataclass
class Golden:
    """One launch. `before` are its tensors, None for a null pointer, `after` what they become.

    Results have the same bits where `tolerance` is 0; else numbers of type `form` are within it and the relative error
    `rounding`. Of launches of the same `company`, each has the rows of the one before as its last.
    """

    name: str
    kernel: str
    blocks: int
    threads: int
    shared: int
    numbers: list[int]
    before: list[Array | None]
    after: list[Array | None]
    tolerance: float = 0.0
    rounding: float = 0.0
    form: str = "float32"
    company: str = ""

    def result(self, tensors: Tensors) -> Array:
        """Return the tensor of a product's results."""
        found = tensors[ENGINE_KERNELS[self.kernel].tensors.index("to")]
        assert found is not None
        return found


def launch(
    device: CudaDevice, kernel: str, blocks: int, threads: int, tensors: Tensors, numbers: Sequence[int], shared: int
) -> None:
    """Copy every array to the device, launch the kernel on them, and copy them back; None is a null pointer."""
    addresses = [0 if each is None else device.allocate(each.nbytes) for each in tensors]
    both = [(address, each) for address, each in zip(addresses, tensors, strict=True) if each is not None]
    with device.lock():
        for address, array in both:
            device.to_device(address, array.ctypes.data, array.nbytes)
        device.launch(kernel, blocks, threads, [*map(c_uint64, addresses), *map(c_int64, numbers)], shared)
        for address, array in both:
            device.to_host(array.ctypes.data, address, array.nbytes)
    device.wait()
    for address, _ in both:
        device.free(address)


def compare(case: Golden, found: Tensors) -> Row:
    """Compare all tensors but scratch memory: outputs, and inputs, which must stay unchanged.

    `differ` numbers have other bits, by at most `error`.
    """
    passed, differ, error = True, 0, 0.0
    for name, expected, got in zip(ENGINE_KERNELS[case.kernel].tensors, case.after, found, strict=True):
        if expected is None or got is None or name == "partial":
            continue
        wanted, numbers = (widened(each, case.form if name == "to" else "") for each in (expected, got))
        bits = (each.reshape(-1).view(f"u{each.itemsize}") for each in (expected, got))
        other = np.not_equal(*bits) & ~(np.isnan(wanted) & np.isnan(numbers))  # a GPU's own operations know one NaN
        if other.any():
            near = np.isclose(numbers, wanted, rtol=case.rounding, atol=case.tolerance)  # never for an infinite one
            passed &= case.tolerance > 0 and bool(near[other].all())
            differ += int(other.sum())
            distances = np.abs(wanted[other] - numbers[other])
            error = max(error, float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max()))
    return {"kernel": case.kernel, "name": case.name, "passed": passed, "differ": differ, "error": error}


def widened(numbers: Array, form: str) -> NDArray[np.float64]:
    """Return numbers of a type that NumPy may not have, in one row."""
    numbers = numbers.reshape(-1)
    if form == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return (numbers.view(np.float16) if form == "float16" else numbers).astype(np.float64)


class StepModel(Strict):
    """An engine's launches and the tensors that it is bound to. Of its constants `values` are known, others random."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    engine: KernelEngine
    capacity: int
    tensors: tuple[Tensor, ...]
    values: dict[str, bytes]

    def sizes(self, rows: int, keys: int) -> dict[str, int]:
        """Return the sizes of a step of `rows` new tokens with `keys` keys in view."""
        ones = dict.fromkeys(names.SYMBOLS, 1) | {names.ROW_EDGES: 2, names.VIEW: keys, names.CAPACITY: self.capacity}
        return ones | dict.fromkeys((names.NEW, names.LOGITS, names.PLACES, names.FEATURED), rows)


def random_words() -> NDArray[np.uint32]:
    """Return words of 32 bits that serve as weights of any type: integers, or numbers of both signs, from 1 to 2 as
    float16 and from 1/128 to 2 as bfloat16 or float32."""
    found = np.random.default_rng(1).integers(0, 2**32, 1 << 22, np.uint32)
    return found & np.uint32(0x83FF83FF) | np.uint32(0x3C003C00)


class LoadedModel:
    """A model on a device, for steps of up to `rows` new tokens with `keys` keys in view, all of one sequence."""

    def __init__(self, device: CudaDevice, model: StepModel, rows: int, keys: int) -> None:
        self._device, self._model, self._keys = device, model, keys
        engine, most = model.engine, model.sizes(rows, keys)
        places = engine.constants | engine.counters | engine.workspace
        sizes = {name: place.size for name, place in places.items()}
        sizes |= {tensor.name: tensor.elements(most) * tensor.dtype.itemsize for tensor in model.tensors}
        self._apart = {name: device.allocate(size) for name, size in sizes.items()}
        shared = device.allocate(engine.workspace_size)
        self._planned = self._apart | {name: shared + place.offset for name, place in engine.workspace.items()}
        pattern = random_words()
        self._upload(source := device.allocate(pattern.nbytes), pattern)
        with device.lock():
            for name in (name for name in sizes if name in engine.constants or name.startswith(("k_cache", "v_cache"))):
                for at in range(0, sizes[name], pattern.nbytes):
                    device.copy(self._apart[name] + at, source, min(pattern.nbytes, sizes[name] - at))
        for name, value in model.values.items():
            self._upload(self._apart[name], np.frombuffer(value, np.uint8))

    def _upload(self, address: int, array: Array) -> None:
        with self._device.lock():
            self._device.to_device(address, array.ctypes.data, array.nbytes)
        self._device.wait()

    def step(self, rows: int, *, apart: bool) -> Step:
        """Return the launches of a step of `rows` new tokens, each after the last, all keys in view of each other.

        Where they are `apart`, no two share workspace: after a whole step, each can be run again by itself.
        """
        engine, sizes = self._model.engine, self._model.sizes(rows, self._keys)
        addresses = self._apart if apart else self._planned
        given = {
            names.TOKEN_IDS: 37 * np.arange(rows) % 64,
            names.POSITIONS: self._keys - rows + np.arange(rows),
            names.PAST_LENGTH: np.array([self._keys - rows]),
            names.LOGIT_INDICES: np.arange(rows),
        }
        for name, numbers in given.items():
            self._upload(addresses[name], numbers.astype(np.int64))
        return list(zip(launch_costs(engine, sizes), calls(engine, addresses, sizes), strict=True))


def env(bench: Bench) -> None:
    versions = {"driver": driver_version(), "python": sys.version.split()[0], "numpy": np.__version__}
    bench.keep({"what": "versions", **versions})
    nothing = Call("outrider_gated_unit", 1, 256, [c_int64(0)] * 5, 0)  # of no rows
    bench.keep({"what": "node of a graph", "us": 1000 * median(bench.graph_times(_NODES * [nothing])) / _NODES})
    bench.keep({"what": "copy", "gb_s": bench.copy_speed()})


def smoke(bench: Bench) -> None:
    before: dict[str, Array] = {}
    golden: list[Golden] = pickle.loads(lzma.decompress((bench.prepared / "golden.xz").read_bytes()))
    for case in golden:
        found = [None if each is None else each.copy() for each in case.before]
        launch(bench.device, case.kernel, case.blocks, case.threads, found, case.numbers, case.shared)
        row = compare(case, found)
        if case.company:  # rows have the same bits in any company
            own = case.result(found)
            last = before.get(case.company, own)
            row["passed"] &= own[-len(last) :].tobytes() == last.tobytes()
            before[case.company] = own
        bench.keep(row)


def steps(bench: Bench) -> None:
    """Whole steps of each model as one graph, and their kernels by part of the model, all layers in turn."""
    settings, copies = bench.settings, bench.copy_speed()
    bench.keep({"what": "empty graph", "us": 1000 * median(bench.graph_times([]))})

    def keep(what: Row, step: Step, cleared: int) -> None:
        moved = sum(cost.moved for cost, _ in step)
        times = bench.graph_times([one for _, one in step], cleared if moved < _PAST_CACHE else 0)
        ms, launches = median(times), len(step)
        row = {"launches": launches, "ms": ms, "least_ms": min(times), "us": 1000 * ms / launches, "moved": moved}
        bench.keep({**what, **row, "share": moved / ms / 1e6 / copies})

    for path in sorted((bench.prepared / "engines").glob("*.json")):
        model = StepModel.model_validate_json(path.read_bytes())
        loaded = LoadedModel(bench.device, model, max(settings["rows"]), settings["keys"])
        for rows in settings["rows"]:
            about = {"model": path.stem, "rows": rows}
            keep({"what": "step", **about}, loaded.step(rows, apart=False), 0)
            step = loaded.step(rows, apart=True)
            bench.enqueue([one for _, one in step])
            for (kernel, part), group in _groups(step).items():
                _, one = group[0]
                grid = {"blocks": one.blocks, "threads": one.threads, "shared": one.shared}
                keep({"what": "kernel", **about, "kernel": kernel, "part": part, **grid}, group, settings["bytes"] // 4)


def _groups(step: Step) -> dict[tuple[str, str], Step]:
    """Return launches by kernel and part of the model, those of all layers together."""
    groups: dict[tuple[str, str], Step] = {}
    for cost, one in step:
        part = re.sub(r"\.\d+", "", cost.launch.part).removeprefix("layers.")
        groups.setdefault((one.kernel.removeprefix("outrider_"), part), []).append((cost, one))
    return groups


def plan(bench: Bench) -> None:
    """The reference plan with every drafter: tokens and bits against the CPU's, and how long rounds take."""
    expected = json.loads((bench.prepared / "expected.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(bench.prepared / "plan.tar.xz", folder, filter="data")
        for graphs in (True, False):
            began, end = perf_counter(), CudaDevice.end_recording
            with patch.object(CudaDevice, "end_recording", autospec=True, side_effect=end) as recorded:
                runtime = Runtime.load(Path(folder), backend="cuda", cuda_graphs=graphs)
                session = runtime.session()
            seconds = perf_counter() - began
            bench.keep({"what": "session", "graphs": graphs, "load_s": seconds, "recorded": recorded.call_count})
            for drafter, runs in expected.items():
                bench.keep({"what": "drafter", "graphs": graphs, "drafter": drafter, **_compare_runs(session, runs)})
            runtime.close()


def decode(session: Session, run: Row, **changed: Any) -> Generation:
    """Decode a run's prompt with its options, or others of the same names."""
    session.reset()
    return session.generate(run["prompt"], **{**run["options"], **changed})


def bits_of(found: Generation) -> list[list[Any]]:
    """Return ids of tokens, and their log-probabilities to the bit."""
    return [[entry.token_id, float(entry.logprob).hex()] for entry in found.logprobs or ()]


def _compare_runs(session: Session, runs: list[Row]) -> Row:
    """Return how many runs have the CPU's tokens and bits of log-probabilities, where the first one differs, and
    figures of rounds without log-probabilities; `waiting` is the share of time in which the host waits."""
    pairs = [(bits_of(decode(session, run)), run["tokens"]) for run in runs]
    both = ((number, at, *two) for number, pair in enumerate(pairs) for at, two in enumerate(zip(*pair, strict=False)))
    first = next((f"run {number}, token {at}: {a}, expected {b}" for number, at, a, b in both if a != b), None)
    stats = [decode(session, run, logprobs=None).stats for run in runs]
    return {
        "passed": all(own == wanted for own, wanted in pairs), "runs": len(runs), "first_difference": first,
        "tokens_equal": sum([token for token, _ in own] == [token for token, _ in wanted] for own, wanted in pairs),
        "bits_equal": sum(own == wanted for own, wanted in pairs),
        "tokens_per_second": median(each.decode_tokens_per_second for each in stats),
        "tokens_per_round": median(each.tokens_per_verify for each in stats),
        "round_ms": median((each.total_ms - each.ttft_ms) / max(each.rounds - 1, 1) for each in stats),
        "waiting": median(each.stage_ms.get("wait", 0.0) / each.total_ms for each in stats),
    }  # fmt: skip


STAGES = {"env": env, "smoke": smoke, "steps": steps, "plan": plan}


def main(name: str, prepared: Path, out: Path) -> None:
    with (out / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1) as file:
        STAGES[name](Bench(prepared, lambda row: print(json.dumps(row), file=file)))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
