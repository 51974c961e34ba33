"""From nothing to the first token: fresh processes, one after another."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider.plans.errors import OutriderError
from outrider.plans.plan import read_manifest
from outrider.runtime.backends import choose_backend
from outrider.runtime.backends.base import check_threads
from outrider.tools.identity import threads_used
from outrider.tools.measuring import Column, make_table, run_in_turn

PROMPT = "def main():\n"
FIGURES = {
    "import_ms": "import outrider",
    "load_ms": "load the plan",
    "first_token_ms": "first token",
    "process_ms": "whole process",
}
_COLUMNS = (
    Column("", "label", text=True), Column("median ms", "median", ".0f"), Column("lowest", "lowest", ".0f"),
    Column("highest", "highest", ".0f"),
)  # fmt: skip
# Runs in the fresh process. Its one line of JSON carries milliseconds; a user's mistake, which we then raise, a text.
_PROGRAM = """
import json, sys, time
start = time.perf_counter()
from outrider import Runtime
imported = time.perf_counter()
from outrider.plans.errors import OutriderError
try:
    runtime = Runtime.load(sys.argv[1], threads=int(sys.argv[2]))
    loaded = time.perf_counter()
    runtime.generate(sys.argv[3], max_new_tokens=1, ignore_eos=True)
except OutriderError as error:
    print(json.dumps(str(error)))
else:
    times = (start, imported, loaded, time.perf_counter())
    print(json.dumps([(after - before) * 1000 for before, after in zip(times, times[1:])]))
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `reps` processes after one that warms the file cache; times in milliseconds."""
    check_threads(options.threads)
    manifest = read_manifest(options.plan)
    threads = threads_used(choose_backend(manifest.backends, None).backend, options.threads)
    plan = options.plan.resolve()
    found = run_in_turn(["a fresh process"], [plan], options.reps, lambda _, plan, __: _run(plan, options.threads))
    columns = zip(FIGURES, zip(*found["a fresh process"], strict=True), strict=True)
    return {
        "plan": str(options.plan),
        "identity": manifest.identity,
        "threads": threads,
        "reps": options.reps,
        "figures": {name: {"median": median(c), "lowest": min(c), "highest": max(c)} for name, c in columns},
    }


def _run(plan: Path, threads: int) -> tuple[float, ...]:
    command = [sys.executable, "-c", _PROGRAM, str(plan), str(threads), PROMPT]
    started = perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    process_ms = (perf_counter() - started) * 1000
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise OutriderError(f"{plan} cannot be started in a fresh process ({said[-1]}); try `outrider generate`.")
    found = json.loads(ended.stdout)
    if isinstance(found, str):
        raise OutriderError(found)
    return (*found, process_ms)


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, python {machine['python']}, onnxruntime "
        f"{machine['onnxruntime']}; plan {report['identity'][:12]}, {report['reps']} fresh processes, files cached"
    )
    rows = [{"label": label, **report["figures"][name]} for name, label in FIGURES.items()]
    console.print(make_table(_COLUMNS, rows))
