"""What a GPU shows of the backend `cuda`: `python -m tools.gpu.measure --prepared .gpu --out results`.

Each stage is a process with a time limit of its own: one that hangs or crashes is reported, and the next one begins.
Its rows are lines of STAGE.jsonl in the folder of results as soon as they are known; report.md has them as a table.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

from commands.arguments import Parser, at_least_1
from commands.console import guarded, stdout
from plans.errors import OutriderError
from runtime.backends.cuda_driver import device_name
from tools.gpu.golden import Row

LIMITS = {"env": 30, "smoke": 40, "steps": 150, "plan": 120}
"""Seconds that each stage may take, in the order in which they run."""
MOST_LINES = 60
_LAST_LINES = 12  # of what a stage printed, in its last row where it did not end well
_MOST_FAILURES = 6
_PARTS = ("q+k+v", "o", "gate+up", "down", "lm_head", "attention")


def measure(prepared: Path, out: Path, cubin: Path, limits: dict[str, int], before: Path | None) -> bool:
    """Run stages in order, each for its limit in seconds at most, and report them. Return whether all passed.

    A stage that is complete in the results `before`, of the same inputs on the same card, is copied from there.
    """
    digest, stages = hashlib.sha256(cubin.read_bytes()), dict[str, list[Row]]()
    for path in sorted(path for path in prepared.rglob("*") if path.is_file() and before not in path.parents):
        digest.update(f"\n{path.relative_to(prepared)}\n".encode() + path.read_bytes())
    measured = {"card": device_name(), "inputs": digest.hexdigest()}
    out.mkdir(parents=True, exist_ok=True)
    for name, limit in limits.items():
        path = out / f"{name}.jsonl"
        stages[name] = read_rows(before / path.name) if before else []
        if stages[name] and stages[name][-1].items() >= {"status": "complete", **measured}.items():
            stdout.print(f"{name}: complete before", markup=False)
        else:
            path.unlink(missing_ok=True)
            end = run_stage([name, prepared, out, cubin], out / "log.txt", limit)
            stages[name] = read_rows(path)
            if failed := sum(row.get("passed") is False for row in stages[name]):
                end["status"] += f", failed in {failed} rows"
            stages[name].append({**end, **measured})
            stdout.print(f"{name}: {end['status']}, {end['seconds']} s", markup=False)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in stages[name]), encoding="utf-8")
        text = "\n".join([f"# {measured['card']}", *report(stages)])
        (out / "report.md").write_text(f"{text}\n", encoding="utf-8")
    stdout.print(text, markup=False, soft_wrap=True)
    return all(rows[-1]["status"] == "complete" for rows in stages.values())


def run_stage(arguments: list[object], log: Path, limit: int) -> Row:
    """Run a stage for at most `limit` seconds, and return how it ended; what it has started is killed with it, also
    where this is interrupted."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tools.gpu.stages", *map(str, arguments)]
    began, code = monotonic(), None
    with log.open("a", encoding="utf-8") as file:
        print(*command, file=file, flush=True)
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = monotonic() - began
    status = f"killed after {limit} s" if code is None else f"crashed, status {code}" if code else "complete"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:] if code else []
    return {"status": status, "seconds": round(seconds, 1), "last": last}


def read_rows(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []  # the last may not be whole
    return [json.loads(line) for line in lines]


def report(stages: dict[str, list[Row]]) -> list[str]:
    """Return lines for rows by stage, the last of which says how it ended: short enough for the end of a log."""
    lines = [f"{name}: {rows[-1]['status']}, {rows[-1]['seconds']} s" for name, rows in stages.items()]
    for name, rows in stages.items():
        lines += rows[-1]["last"][-1:]
        lines += {"smoke": _smoke, "steps": _steps}.get(name, _plain)(rows[:-1])
    if len(lines) >= MOST_LINES:
        lines[MOST_LINES - 2 :] = [f"... {len(lines) - MOST_LINES + 2} lines more, of rows in the files of stages"]
    return lines


def _plain(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        yield ", ".join(f"{value}" if key == "what" else f"{key} {value}" for key, value in shown.items())


def _smoke(rows: list[Row]) -> Iterator[str]:
    for kernel in sorted({row["kernel"] for row in rows}):
        own = [row for row in rows if row["kernel"] == kernel]
        passed, error = sum(row["passed"] for row in own), max(row["error"] for row in own)
        yield f"{kernel}: {passed} of {len(own)} passed, largest error {error:.2g}"
    yield from [f"FAIL {row['name']}: {row['differ']} differ" for row in rows if not row["passed"]][:_MOST_FAILURES]


def _steps(rows: list[Row]) -> Iterator[str]:
    """A line for each step: its time, the sum of its kernels', and us (and share of copies) of the main ones."""
    heads = ("model", "rows", "step ms", "launches", "GB", "of copies", "kernels ms", *_PARTS)
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for step in (row for row in rows if row["what"] == "step"):
        key = ("kernel", step["model"], step["rows"])
        own = [row for row in rows if (row["what"], row["model"], row["rows"]) == key]
        cells = [step["model"], step["rows"], f"{step['ms']:.3f}", step["launches"], f"{step['moved'] / 1e9:.2f}"]
        cells += [f"{step['share']:.0%}", f"{sum(row['ms'] for row in own):.3f}"]
        shown = {row["part"]: f"{row['us']:.1f} ({row['share']:.0%})" for row in reversed(own)}
        yield f"| {' | '.join(map(str, [*cells, *(shown.get(part, '') for part in _PARTS)]))} |"


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(_parser().parse_args(sys.argv[1:] if given is None else given)))


def _limits(text: str) -> dict[str, int]:
    """Parse stages with commas, each with its limit where it has one of its own."""
    words = [word.partition("=") for word in text.split(",")]
    if unknown := [name for name, *_ in words if name not in LIMITS]:
        raise argparse.ArgumentTypeError(f"is {unknown[0]!r}; choose from {', '.join(LIMITS)}")
    return {name: at_least_1(seconds) if seconds else LIMITS[name] for name, _, seconds in words}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: %(prog)s --prepared .gpu --out build/gpu --stages env,smoke=20,steps",
    )  # fmt: skip
    parser.add_argument("--prepared", type=Path, default=Path(".gpu"), help="what tools.gpu.prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stages", type=_limits, default=",".join(LIMITS), help="NAME or NAME=SECONDS, with commas")
    parser.add_argument("--cubin", type=Path, help="kernels of another checkout, for smoke and steps")
    parser.add_argument("--resume", type=Path, help="earlier results: stages complete there are not run again")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    prepared, out = arguments.prepared.absolute(), arguments.out.absolute()
    cubins = sorted(prepared.glob("cubins/*.engine.*.cubin"))
    if not cubins:
        raise OutriderError(f"{prepared} was not prepared; run python -m tools.gpu.prepare first")
    if len(cubins) > 1:
        raise OutriderError(f"{prepared}/cubins has kernels of other sources too; remove it, and prepare again")
    before = arguments.resume.absolute() if arguments.resume else None
    return 0 if measure(prepared, out, (arguments.cubin or cubins[0]).absolute(), arguments.stages, before) else 1


if __name__ == "__main__":
    sys.exit(main())
