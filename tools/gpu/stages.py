"""The stages of `tools.gpu.measure`, each run in a process of its own: what it measures, and for how long at most."""

from __future__ import annotations

import csv
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from plans import names
from plugins.cuda.engine_kernels import ENGINE_KERNELS
from runtime.backends.cuda_driver import CudaDevice, call, device_name, driver_version
from tools.gpu.bench import Bench, LoadedModel, Row, Step, enqueue_all, launch, run_golden, times
from tools.gpu.golden import Golden, compare, compare_company, read_golden

if TYPE_CHECKING:  # which takes a second to load
    from runtime import Session

ROOT = Path(__file__).resolve().parent.parent.parent
_PACKAGES = ("numpy", "pydantic", "cuda-bindings", "llguidance", "onnxruntime")
_PROFILED = (  # of the model, its tokens, and a part of a kernel's name and of the model: of the last launch that fits
    ("8b.int4", 1, "product", "gate+up"), ("8b.int4", 1, "product", "down"), ("8b.int4", 1, "attend", "attention"),
    ("8b.int4", 32, "product", "gate+up"), ("8b.bfloat16", 1, "product", "gate+up"),
    ("8b.bfloat16", 1, "product", "down"), ("8b.bfloat16", 8, "product", "gate+up"),
    ("8b.bfloat16", 32, "product", "gate+up"),
)  # fmt: skip
_METRICS = ("Duration", "DRAM Throughput", "L2 Hit Rate", "Achieved Occupancy", "Registers Per Thread", "No Eligible")
_VARIED = ("product", "attend")  # parts of the names of kernels that variants are compared by


@dataclass(frozen=True)
class Stage:
    """`seconds` are the most that it may take."""

    name: str
    seconds: float
    take: Callable[[Bench], None]


def env(bench: Bench) -> None:
    settings = bench.settings
    bench.keep({"what": "clocks before", "text": _clocks()})
    versions = {"python": platform.python_version(), "driver": driver_version(), "card": device_name()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "none"
    bench.keep({"what": "versions", **versions})
    device = bench.probe
    ms = median(times(device, _launcher(device, "probe_empty", 1, 32, repeats=settings.empty), 5)) / settings.empty
    bench.keep({"what": "node of a graph", "us": 1000 * ms})
    size = settings.copy_bytes
    source, to = device.allocate(size), device.allocate(size)
    with device.lock():  # one by one: in a graph a copy is slower
        for _ in range(3):
            device.copy(to, source, size)
        marks = [device.timed_mark()]
        for _ in range(settings.step_repeats):
            device.copy(to, source, size)
        marks.append(device.timed_mark())
    ms = device.milliseconds(*marks) / settings.step_repeats
    bench.keep({"what": "copy", "gb_s": 2 * size / ms / 1e6})
    whole = device.allocate(settings.read_bytes)
    launch(device, "probe_fill_reals", 2048, 256, whole, settings.read_bytes, 1)
    best = min(  # of several grids
        median(times(device, _launcher(device, "probe_read", blocks, 256, whole, to, settings.read_bytes // 16), 5))
        for blocks in (132 * 4, 132 * 8, 132 * 16, 132 * 64)
    )
    bench.keep({"what": "read", "gb_s": settings.read_bytes / best / 1e6})
    bench.keep({"what": "clocks after", "text": _clocks()})


def _launcher(
    device: CudaDevice, kernel: str, blocks: int, threads: int, *values: int, repeats: int = 1
) -> Callable[[], None]:
    def enqueue() -> None:
        for _ in range(repeats):
            launch(device, kernel, blocks, threads, *values)

    return enqueue


def _clocks() -> str:
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "no nvidia-smi"
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()


def smoke(bench: Bench) -> None:
    cases, results = read_golden(bench.prepared / "golden.npz"), []
    for case in cases:
        results.append(run_golden(bench.engine, case))
        bench.keep(asdict(compare(case, results[-1])))
    for verdict in compare_company(cases, results):
        bench.keep(asdict(verdict))


def steps(bench: Bench) -> None:
    for name, model in bench.models().items():
        with LoadedModel(bench, model) as loaded:
            for rows in bench.settings.rows:
                step = loaded.step(rows)
                ms = times(bench.engine, enqueue_all(bench.engine, _calls(step)), bench.settings.step_repeats)
                moved = sum(cost.moved for cost, _ in step)
                row = {"model": name, "rows": rows, "ms": median(ms), "least_ms": min(ms), "launches": len(step)}
                bench.keep({**row, "moved": moved, **bench.rate(moved, median(ms))})


def kernels(bench: Bench) -> None:
    for name, rows, step in _steps_apart(bench):
        for (kernel, part), group in _groups(step).items():
            row = {"model": name, "rows": rows, "kernel": kernel, "part": part}
            bench.keep(row | _time_group(bench, bench.engine, group))


def _steps_apart(bench: Bench) -> Iterator[tuple[str, int, Step]]:
    """Yield every model and its steps, after which each launch can be run again by itself."""
    for name, model in bench.models().items():
        with LoadedModel(bench, model, apart=True) as loaded:
            for rows in bench.settings.rows:
                step = loaded.step(rows)
                with bench.engine.lock():
                    enqueue_all(bench.engine, _calls(step))()
                bench.engine.wait()
                yield name, rows, step


def _calls(step: Step) -> list[Any]:
    return [call for _, call in step]


def _groups(step: Step, kernels: Sequence[str] = ("",)) -> dict[tuple[str, str], Step]:
    """Return launches by kernel and part of the model, those of all layers together."""
    groups: dict[tuple[str, str], Step] = {}
    for cost, one in step:
        if any(name in cost.launch.kernel for name in kernels):
            part = re.sub(r"\.\d+", "", cost.launch.part)
            groups.setdefault((cost.launch.kernel.removeprefix("outrider_"), part), []).append((cost, one))
    return groups


def _time_group(bench: Bench, device: CudaDevice, group: Step) -> Row:
    settings, moved = bench.settings, sum(cost.moved for cost, _ in group)
    flush = (bench.scratch, settings.flush_bytes) if moved < settings.past_cache else (0, 0)
    ms = times(device, enqueue_all(device, _calls(group)), settings.kernel_repeats, flush)
    _, one = group[0]
    row = {"launches": len(group), "us": 1000 * median(ms) / len(group), "least_us": 1000 * min(ms) / len(group)}
    row |= {"blocks": one.blocks, "threads": one.threads, "shared": one.shared, "moved": moved // len(group)}
    return row | bench.rate(moved, median(ms))


def plan(bench: Bench) -> None:
    from runtime import Runtime

    expected = json.loads((bench.prepared / "expected.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(bench.prepared / "plan.tar.xz") as file:
            file.extractall(folder, filter="data")
        for graphs in (True, False):
            recorded, free, began = _Count(CudaDevice.end_recording), _free_bytes(bench), perf_counter()
            with patch.object(CudaDevice, "end_recording", lambda device, count=recorded: count(device)):
                runtime = Runtime.load(Path(folder) / "plan", backend="cuda", cuda_graphs=graphs)
                loaded = perf_counter()
                session = runtime.session()
            row: Row = {"what": "session", "graphs": graphs, "load_s": loaded - began}
            row |= {"warm_up_s": perf_counter() - loaded, "recorded": recorded.count}
            bench.keep({**row, "device_mb": (free - _free_bytes(bench)) / 1e6})
            for drafter, runs in expected["runs"].items():
                own = _drafter(bench, session, drafter, expected["prompts"], runs)
                bench.keep({"what": "drafter", "graphs": graphs, "drafter": drafter, **own})
            runtime.close()


def _drafter(bench: Bench, session: Session, drafter: str, prompts: list[list[int]], runs: list[Row]) -> Row:
    """Compare a drafter's tokens and log-probabilities with those expected, and return how fast it is."""
    from tools.gpu.decoding import decode, launches

    tokens_equal, bits_equal, parting = 0, 0, ""
    for number, run in enumerate(runs):
        session.reset()
        found = session.generate(prompts[run["prompt"]], drafter=drafter, **run["options"])
        bits = [float(entry.logprob).hex() for entry in found.logprobs or ()]
        tokens_equal += found.token_ids == run["token_ids"]
        bits_equal += bits == run["logprobs"]
        wanted = list(zip(run["token_ids"], run["logprobs"], strict=True))
        pairs = zip(zip(found.token_ids, bits, strict=True), wanted, strict=False)
        different = next(((at, *pair) for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if different and not parting:
            parting = "run {}, token {}: {}, expected {}".format(number, *different)
    row: Row = {"runs": len(runs), "tokens_equal": tokens_equal, "bits_equal": bits_equal}
    figures = [decode(session, ids, drafter, bench.settings.new_tokens) for ids in prompts]
    row |= {key: median(one[key] for one in figures) for key in figures[0]}
    fused = names.speculate(drafter)
    program = names.DECODE if drafter == "none" else fused if fused in session.programs else names.VERIFY
    return row | {"launches": launches(session, program), "first_difference": parting}


def _free_bytes(bench: Bench) -> int:
    with bench.engine.lock():
        return int(call("cuMemGetInfo")[0])


class _Count:
    """Calls a function, and counts."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.count = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        return self._function(*arguments)


def variants(bench: Bench) -> None:
    devices = {
        path.name.split(".")[0]: bench.device(path) for path in sorted((bench.prepared / "variants").glob("*.xz"))
    }
    if not devices:
        bench.keep({"what": "none", "text": "no variants are prepared"})
        return
    cases = [
        case for case in read_golden(bench.prepared / "golden.npz") if any(name in case.kernel for name in _VARIED)
    ]
    base = [run_golden(bench.engine, case) for case in cases]
    for name, device in devices.items():
        found = [run_golden(device, case) for case in cases]
        same = [
            all(a is None or b is None or a.tobytes() == b.tobytes() for a, b in zip(*pair, strict=True))
            for pair in zip(base, found, strict=True)
        ]
        bench.keep({"what": "bits", "variant": name, "equal": sum(same), "cases": len(cases)})
    for model, rows, step in _steps_apart(bench):
        for (kernel, part), group in _groups(step, _VARIED).items():
            us = {"base": _time_group(bench, bench.engine, group)["us"]}
            us |= {name: _time_group(bench, device, group)["us"] for name, device in devices.items()}
            bench.keep({"what": "times", "model": model, "rows": rows, "kernel": kernel, "part": part, "us": us})


def ncu(bench: Bench) -> None:
    """Launches of `ncu_target`, which alone it profiles, by NVIDIA's profiler; its csv of details is kept."""
    log = bench.out / "ncu.csv"
    tool = [
        "ncu",
        "--clock-control",
        "none",
        "--set",
        "full",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "details",
    ]
    status, said = _run_tool(bench, [*tool, "--log-file", str(log)], "ncu-target")
    bench.keep({"what": "ncu", "text": ": ".join([status, *said[-1:]])})
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    kept: dict[str, Row] = {}
    for line in csv.DictReader(each for each in lines if each.startswith('"')):
        row = kept.setdefault(line["ID"], {"what": "kernel", "kernel": line["Kernel Name"]})
        if line["Metric Name"] in _METRICS:
            row[line["Metric Name"]] = f"{line['Metric Value']} {line['Metric Unit']}"
    for row, (model, rows, _, part) in zip(kept.values(), _PROFILED, strict=False):
        bench.keep({"model": model, "rows": rows, "part": part, **row})


def ncu_target(bench: Bench) -> None:
    models = bench.models()
    for name in dict.fromkeys(name for name, *_ in _PROFILED if name in models):
        with LoadedModel(bench, models[name], apart=True) as loaded:
            for own, rows, kernel, part in _PROFILED:
                if own != name or rows not in bench.settings.rows:
                    continue
                step = loaded.step(rows)
                with bench.engine.lock():
                    enqueue_all(bench.engine, _calls(step))()
                bench.engine.wait()
                fitting = [c for cost, c in step if kernel in c.kernel and part in cost.launch.part]
                call("cuProfilerStart")
                with bench.engine.lock():
                    enqueue_all(bench.engine, fitting[-1:])()
                bench.engine.wait()
                call("cuProfilerStop")


def sanitizer(bench: Bench) -> None:
    with (bench.out / "sanitizer.txt").open("w", encoding="utf-8") as file:
        for tool in ("memcheck", "racecheck"):
            status, said = _run_tool(bench, ["compute-sanitizer", "--tool", tool], "sanitizer-target")
            file.write("\n".join([f"{tool}: {status}", *said[:2000], ""]))
            file.flush()
            summary = [line.strip("= ") for line in said if "SUMMARY" in line]
            row: Row = {"what": tool, "text": "; ".join([status, *(summary or said[-1:])])}
            if summary:
                row["passed"] = all(re.search(r"SUMMARY: 0 (errors|hazards)", line) is not None for line in summary)
            bench.keep(row)


def sanitizer_target(bench: Bench) -> None:
    """One launch of each kernel and, of products, of few rows and of many."""
    chosen: dict[tuple[str, bool], Golden] = {}
    for case in read_golden(bench.prepared / "golden.npz"):
        numbers = ENGINE_KERNELS[case.kernel].numbers if case.kernel in ENGINE_KERNELS else ()
        rows = dict(zip(numbers, case.numbers, strict=False)).get("rows", 0)
        chosen.setdefault((case.kernel, "product" in case.kernel and 1 < rows <= 8), case)
    for case in chosen.values():
        run_golden(bench.engine, case)


def _run_tool(bench: Bench, tool: Sequence[str], stage: str) -> tuple[str, list[str]]:
    """Run a stage under a tool; return how it ended, and what was said."""
    if shutil.which(tool[0]) is None:
        return f"{tool[0]} is not there", []
    command = [*tool, sys.executable, "-m", "tools.gpu.measure", "--stage", stage]
    command += ["--prepared", str(bench.prepared), "--out", str(bench.out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "ended" if done.returncode == 0 else f"failed with status {done.returncode}", said


STAGES = {
    stage.name: stage
    for stage in (
        Stage("env", 25, env),
        Stage("smoke", 40, smoke),
        Stage("steps", 60, steps),
        Stage("kernels", 90, kernels),
        Stage("plan", 100, plan),
        Stage("variants", 60, variants),
        Stage("ncu", 75, ncu),
        Stage("sanitizer", 45, sanitizer),
    )
}
"""In the order in which they run."""

TARGETS = {"ncu-target": ncu_target, "sanitizer-target": sanitizer_target}
"""What the stages of tools run under their tool."""
