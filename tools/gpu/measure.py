"""What a GPU shows of the backend `cuda`: `python -m tools.gpu.measure --prepared .gpu --out results --budget 400`.

Each stage is a process with a limit of its own: one that hangs or crashes is reported, and the next one begins. What
was found so far is in `report.json` and `report.md` of the folder of results at any time.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from commands.arguments import Parser, at_least_1
from commands.console import guarded, stdout
from plans.errors import OutriderError
from runtime.backends.cuda_driver import device_name
from tools.gpu.bench import Bench, Row
from tools.gpu.stages import ROOT, STAGES, TARGETS, Stage
from tools.gpu.table import table

_LAST_LINES = 12  # of what a stage said, in the report where it failed
_LEAST_SECONDS = 5  # for which no stage begins

_COUNTS = ("bits_equal", "runs"), ("equal", "cases")  # of a row: the count that passed, and all

Report = dict[str, Any]


def take_stage(name: str, prepared: Path, out: Path, part: Path | None) -> int:
    """Run one stage in this process; each row is a line of `part`."""
    path = out / "report.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"stages": {}}
    with (part or Path(os.devnull)).open("a", encoding="utf-8", buffering=1) as file:
        bench = Bench(prepared, out, lambda row: print(json.dumps(row), file=file), report)
        (TARGETS[name] if name in TARGETS else STAGES[name].take)(bench)
    return 0


class Run:
    """One call of the command: its report, and the folder in which it is written."""

    def __init__(self, prepared: Path, out: Path, resumed: Path | None) -> None:
        self._prepared, self._out = prepared, out
        cubin = hashlib.sha256((prepared / "engine.sm_90.cubin").read_bytes()).hexdigest()
        self.report: Report = {"card": device_name(), "cubin": cubin, "stages": {}}
        out.mkdir(parents=True, exist_ok=True)
        if resumed is not None:
            old = json.loads(resumed.read_text(encoding="utf-8"))
            if (old["card"], old["cubin"]) == (self.report["card"], cubin):
                ended = {name: stage for name, stage in old["stages"].items() if stage["status"] == "complete"}
                self.report["stages"] = ended
        self.write()

    def take(self, stage: Stage, seconds: float) -> None:
        """Run a stage for so long at most, and keep what it has found, whatever happens to it."""
        entry: Report = {"status": "running", "seconds": 0.0, "rows": [], "last": []}
        self.report["stages"][stage.name] = entry
        command = [sys.executable, "-m", "tools.gpu.measure", "--stage", stage.name]
        began = monotonic()
        with tempfile.TemporaryDirectory() as folder, (self._out / "log.txt").open("ab") as log:
            part, start = Path(folder) / "rows", log.tell()
            options = ["--prepared", str(self._prepared), "--out", str(self._out), "--part", str(part)]
            child = subprocess.Popen(
                [*command, *options], cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            while entry["status"] == "running":
                try:
                    code = child.wait(timeout=0.5)
                    entry["status"] = "complete" if code == 0 else f"crashed, {_reason(code)}"
                except subprocess.TimeoutExpired:
                    if monotonic() - began > seconds:
                        entry["status"] = f"killed after {seconds:.0f} s"
                entry["seconds"] = round(monotonic() - began, 1)
                if (rows := _rows(part)) != entry["rows"]:
                    entry["rows"] = rows
                    self.write()
            _kill_group(child)  # tools that the stage has started too
            entry["rows"] = _rows(part)
        told = [f"{stage.name}: {row}" for row in entry["rows"] if failed(row)]
        if entry["status"] == "complete" and told:
            entry["status"] = f"failed in {len(told)} of {len(entry['rows'])} rows"
        elif entry["status"] != "complete":
            said = (self._out / "log.txt").read_bytes()[start:].decode(errors="replace")
            entry["last"] = said.splitlines()[-_LAST_LINES:]
            told += [f"{stage.name}: {entry['status']}", *entry["last"]]
        if told:
            with (self._out / "faults.txt").open("a", encoding="utf-8") as faults:
                faults.write("\n".join([*told, ""]))
        self.write()

    def write(self) -> None:
        """Write all files of the report; each is whole at any time."""
        self._replace("report.json", json.dumps(self.report, indent=1))
        self._replace("report.md", "\n".join(table(self.report)) + "\n")
        stages = self.report["stages"]
        if "plan" in stages:
            self._replace("sessions.json", json.dumps(stages["plan"]["rows"], indent=1))
        if rows := stages.get("kernels", {}).get("rows"):
            part = self._out / "kernels.csv.part"
            with part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            part.replace(self._out / "kernels.csv")

    def _replace(self, name: str, text: str) -> None:
        part = self._out / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(self._out / name)


def failed(row: Row) -> bool:
    """Return whether a row says that something is not as it should be."""
    of_runs, of_cases = (row.get(name, row.get(all_of)) != row.get(all_of) for name, all_of in _COUNTS)
    return row.get("passed") is False or of_runs or of_cases


def _rows(part: Path) -> list[Row]:
    lines = part.read_text(encoding="utf-8").split("\n")[:-1] if part.exists() else []  # the last may not be whole
    return [json.loads(line) for line in lines]


def _reason(code: int) -> str:
    return f"status {code}" if code > 0 else signal.Signals(-code).name


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # one that waits for the driver may not end
        child.wait(timeout=10)


def measure(prepared: Path, out: Path, budget: float, stages: Sequence[str], resumed: Path | None) -> bool:
    """Run stages in order, each for its own limit or what is left of `budget` seconds. Return whether all passed."""
    began, run = monotonic(), Run(prepared, out, resumed)
    for name in stages:
        if name in run.report["stages"]:
            stdout.print(f"{name}: complete before", markup=False)
            continue
        seconds = min(STAGES[name].seconds, budget - (monotonic() - began))
        if seconds < _LEAST_SECONDS:
            run.report["stages"][name] = {"status": "no time left", "seconds": 0.0, "rows": [], "last": []}
            continue
        stdout.print(f"{name}: at most {seconds:.0f} s ...", markup=False)
        run.take(STAGES[name], seconds)
        entry = run.report["stages"][name]
        stdout.print(f"{name}: {entry['status']}, {entry['seconds']} s, {len(entry['rows'])} rows", markup=False)
    run.write()
    stdout.print("\n".join(table(run.report)), markup=False, soft_wrap=True)
    return all(run.report["stages"][name]["status"] == "complete" for name in stages)


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu.measure",
        description=__doc__,
        epilog="example: %(prog)s --prepared .gpu --out build/gpu --budget 400 --stages env,smoke,steps",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prepared", type=Path, default=Path(".gpu"), help="what tools.gpu.prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--budget", type=at_least_1, default=400, help="seconds of all stages together (default 400)")
    parser.add_argument("--stages", default=",".join(STAGES), help="with commas, in order (default: %(default)s)")
    parser.add_argument("--resume", type=Path, help="a report.json, whose complete stages of this GPU are taken over")
    parser.add_argument("--stage", choices=[*STAGES, *TARGETS], help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(given: list[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(given)
    if arguments.stage is not None:
        return take_stage(arguments.stage, arguments.prepared, arguments.out, arguments.part)
    stages = arguments.stages.split(",")
    if unknown := [name for name in stages if name not in STAGES]:
        parser.error(f"argument --stages: there is no {', '.join(unknown)}; choose of {', '.join(STAGES)}")
    if not (arguments.prepared / "settings.json").exists():
        raise OutriderError(f"{arguments.prepared} was not prepared; run python -m tools.gpu.prepare first")
    prepared, out = arguments.prepared.absolute(), arguments.out.absolute()
    return 0 if measure(prepared, out, arguments.budget, stages, arguments.resume) else 1


if __name__ == "__main__":
    sys.exit(main())
