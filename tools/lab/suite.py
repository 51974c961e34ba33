"""Where the tests' time goes: a plugin of pytest that measures, and a command that prints its tables.

    python -m pytest -p outrider.tools.lab.suite -n 2
    python -m outrider.tools.lab.suite > tools/results/suite.txt

Each process writes `build/suite/<worker>.jsonl`, a line for each phase of a test and each fixture that was made. A
processor's seconds are those of the process and of the children that it waited for, so a server's are counted where it
is stopped, and a Ray cluster's nowhere.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from outrider.plans.machine import processor

FOLDER = Path(__file__).resolve().parents[2] / "build" / "suite"
KINDS = {"function": 30, "file": 30, "fixture": 20}
"""What seconds are summed by, with the number of rows printed."""


def _seconds() -> tuple[float, float]:
    """Of the clock and of the processor."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


class Suite:
    """Measures one process of tests."""

    def __init__(self, worker: str) -> None:
        self._file = open(FOLDER / f"{worker}.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self._start = time.perf_counter(), 0.0  # the process has worked for its imports already

    def _write(self, before: tuple[float, float], **row: str) -> None:
        clock, cpu = (now - then for now, then in zip(_seconds(), before, strict=True))
        self._file.write(json.dumps({**row, "clock": round(clock, 4), "cpu": round(cpu, 4)}) + "\n")

    def _phase(self, phase: str, item: pytest.Item) -> Generator[None, Any, Any]:
        before = _seconds()
        try:
            return (yield)
        finally:
            self._write(before, phase=phase, test=item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase("setup", item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase("call", item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phase("teardown", item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        before = _seconds()
        try:
            return (yield)
        finally:
            self._write(before, fixture=f"{fixturedef.argname} ({fixturedef.baseid or 'pytest'})")

    def pytest_sessionfinish(self) -> None:
        self._write(self._start, phase="all", test="")
        self._file.close()


def pytest_configure(config: pytest.Config) -> None:
    worker: str = getattr(config, "workerinput", {}).get("workerid", "main")
    if worker == "main":
        FOLDER.mkdir(parents=True, exist_ok=True)
        for file in FOLDER.glob("*.jsonl"):
            file.unlink()
    if worker != "main" or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Suite(worker), "suite")


def head(folder: Path) -> str:
    """When, where and of what the run was, and how long its processes took."""
    files = sorted(folder.glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.open(encoding="utf-8")]
    whole = max((row["clock"] for row in rows if row.get("phase") == "all"), default=0.0)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    day = date.fromtimestamp(files[0].stat().st_mtime)
    return (
        f"$ bash tools/test.sh    ({day}, commit {commit.stdout.strip()}, {processor()})\n"
        f"{len(files)} processes on {os.cpu_count()} cores: {whole:.0f} s"
    )


def tables(folder: Path) -> Iterator[str]:
    """The lines: the whole, then the dearest functions, files and fixtures, by the processor's seconds."""
    rows = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open(encoding="utf-8")]
    sums: dict[str, dict[str, list[float]]] = {kind: defaultdict(lambda: [0.0, 0.0, 0]) for kind in (*KINDS, "phase")}
    for row in rows:
        keys = {"fixture": row["fixture"]} if "fixture" in row else {"phase": row["phase"]}
        if row.get("test"):
            keys |= {"function": row["test"].split("[")[0], "file": row["test"].split("::")[0]}
        for kind, key in keys.items():
            counted = sums[kind][key]
            counted[0] += row["clock"]
            counted[1] += row["cpu"]
            counted[2] += row.get("phase", "call") in ("call", "all")
    for kind, dearest in {"phase": len(sums["phase"]), **KINDS}.items():
        yield f"{'CPU s':>8}  {'clock s':>8}  {'times':>6}  {kind}"
        for key, (clock, cpu, times) in sorted(sums[kind].items(), key=lambda entry: -entry[1][1])[:dearest]:
            yield f"{cpu:8.1f}  {clock:8.1f}  {times:6.0f}  {key}"
        yield ""


if __name__ == "__main__":
    print(head(FOLDER) + "\n")
    print("\n".join(tables(FOLDER)).rstrip())
