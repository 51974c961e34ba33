"""The stages of `tools.gpu.measure`: `python -m tools.gpu.stages NAME PREPARED OUT CUBIN` runs one in this process.

Each row that it finds is a line of OUT/NAME.jsonl at once. A row that has `passed` false makes the stage fail.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from runtime.backends.cuda_driver import CudaDevice, driver_version
from runtime.backends.kernel_engines import Call
from tools.gpu.bench import LoadedModel, Settings, Step, copy_speed, enqueue_all, run_golden, times
from tools.gpu.golden import Array, Row, compare, read_golden
from tools.gpu.step_model import StepModel

if TYPE_CHECKING:  # which takes a second to load
    from runtime import Session

_NODES = 1000  # of the graph of kernels that do nothing
_PAST_CACHE = 150_000_000  # bytes of launches that evict the L2 cache themselves


class Bench:
    """The folder that `tools.gpu.prepare` filled, the kernels that are measured, and how a row is kept."""

    def __init__(self, prepared: Path, cubin: Path, keep: Callable[[Row], None]) -> None:
        self.prepared, self.keep, self.device = prepared, keep, CudaDevice()
        self.settings = Settings(**json.loads((prepared / "settings.json").read_text(encoding="utf-8")))
        self.device.load_kernels(cubin)


def env(bench: Bench) -> None:
    bench.keep(
        {"what": "versions", "driver": driver_version(), "python": sys.version.split()[0], "numpy": np.__version__}
    )
    nothing = Call("outrider_gated_unit", 1, 256, [c_int64(0)] * 5, 0)  # of no rows
    bench.keep({"what": "node of a graph", "us": 1000 * median(times(bench.device, _NODES * [nothing], 5)) / _NODES})
    bench.keep({"what": "copy", "gb_s": copy_speed(bench.device, bench.settings)})


def smoke(bench: Bench) -> None:
    before: dict[str, Array] = {}
    for case in read_golden(bench.prepared / "golden.xz"):
        found = run_golden(bench.device, case)
        row = compare(case, found)
        if case.company:  # rows have the same bits in any company
            own = case.result(found)
            last = before.get(case.company, own)
            row["passed"] &= own[-len(last) :].tobytes() == last.tobytes()
            before[case.company] = own
        bench.keep(row)


def steps(bench: Bench) -> None:
    """Whole steps of each model as one graph, and their kernels by part of the model, all layers in turn."""
    device, settings = bench.device, bench.settings
    copies = copy_speed(device, settings)
    for path in sorted((bench.prepared / "engines").glob("*.json")):
        loaded = LoadedModel(device, StepModel.model_validate_json(path.read_bytes()), settings)
        for rows in settings.rows:
            row = {"model": path.stem, "rows": rows}
            step = loaded.step(rows, apart=False)
            bench.keep({"what": "step", **row, **_time(device, step, settings.repeats, copies)})
            step = loaded.step(rows, apart=True)
            with device.lock():
                enqueue_all(device, [one for _, one in step])
            for (kernel, part), group in _groups(step).items():
                _, one = group[0]
                grid = {"blocks": one.blocks, "threads": one.threads, "shared": one.shared}
                found = _time(device, group, settings.repeats, copies, settings.bytes // 4)
                bench.keep({"what": "kernel", **row, "kernel": kernel, "part": part, **grid, **found})


def _groups(step: Step) -> dict[tuple[str, str], Step]:
    """Return launches by kernel and part of the model, those of all layers together."""
    groups: dict[tuple[str, str], Step] = {}
    for cost, one in step:
        part = re.sub(r"\.\d+", "", cost.launch.part).removeprefix("layers.")
        groups.setdefault((one.kernel.removeprefix("outrider_"), part), []).append((cost, one))
    return groups


def _time(device: CudaDevice, step: Step, repeats: int, copies: float, cleared: int = 0) -> Row:
    moved = sum(cost.moved for cost, _ in step)
    ms = times(device, [one for _, one in step], repeats, cleared if moved < _PAST_CACHE else 0)
    row = {"launches": len(step), "ms": median(ms), "least_ms": min(ms), "us": 1000 * median(ms) / len(step)}
    return row | {"moved": moved, "share": moved / median(ms) / 1e6 / copies}


def plan(bench: Bench) -> None:
    """The reference plan with every drafter: tokens and bits against the CPU's, and how long rounds take."""
    from runtime import Runtime

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
            for drafter, runs in expected["runs"].items():
                row = {"what": "drafter", "graphs": graphs, "drafter": drafter}
                bench.keep({**row, **_decode(session, expected["prompts"], drafter, runs)})
            runtime.close()


def _decode(session: Session, prompts: list[list[int]], drafter: str, runs: list[Row]) -> Row:
    """Return how many runs have the CPU's tokens and bits of log-probabilities, where the first one differs, and
    figures of rounds without log-probabilities; `waiting` is the share of time in which the host waits."""
    tokens, bits, first, stats = 0, 0, "", []
    for number, run in enumerate(runs):
        session.reset()
        found = session.generate(prompts[run["prompt"]], drafter=drafter, **run["options"])
        own = [(entry.token_id, float(entry.logprob).hex()) for entry in found.logprobs or ()]
        wanted = list(zip(run["token_ids"], run["logprobs"], strict=True))
        tokens += found.token_ids == run["token_ids"]
        bits += own == wanted
        pairs = enumerate(zip(own, wanted, strict=False))
        first = first or next((f"run {number}, token {at}: {a}, expected {b}" for at, (a, b) in pairs if a != b), "")
        session.reset()
        options: dict[str, Any] = {**run["options"], "logprobs": None}
        stats.append(session.generate(prompts[run["prompt"]], drafter=drafter, **options).stats)
    return {
        "passed": tokens == bits == len(runs), "runs": len(runs), "tokens_equal": tokens, "bits_equal": bits,
        "first_difference": first or None, "tokens_per_second": median(each.decode_tokens_per_second for each in stats),
        "tokens_per_round": median(each.tokens_per_verify for each in stats),
        "round_ms": median((each.total_ms - each.ttft_ms) / max(each.rounds - 1, 1) for each in stats),
        "waiting": median(each.stage_ms.get("wait", 0.0) / each.total_ms for each in stats),
    }  # fmt: skip


STAGES = {"env": env, "smoke": smoke, "steps": steps, "plan": plan}


def main(name: str, prepared: Path, out: Path, cubin: Path) -> None:
    with (out / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1) as file:
        STAGES[name](Bench(prepared, cubin, lambda row: print(json.dumps(row), file=file)))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
