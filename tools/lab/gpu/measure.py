"""What a GPU shows of the backend `cuda`: `python -m outrider.tools.lab.gpu.measure --prepared .gpu --out results`.

Each stage is a process with a time limit of its own: one that hangs or crashes is reported, and the next one begins.
Its rows are lines of STAGE.jsonl in the folder of results as soon as they are known; report.md has them as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

from outrider.commands.arguments import Parser, at_least_1
from outrider.commands.console import guarded, stdout
from outrider.plans.errors import OutriderError
from outrider.plans.plan import files_sha256
from outrider.runtime.backends.cuda_driver import device_name
from outrider.tools.lab.gpu.stages import Row
from outrider.tools.markdown import markdown_table

STAGES = {
    "env": (30, ("cubins", "settings.json")),
    "smoke": (40, ("cubins", "golden.xz")),
    "steps": (150, ("cubins", "engines", "settings.json")),
    "plan": (120, ("expected.json", "native", "plan.tar.xz")),
}
"""In the order in which they run: seconds that each may take, and the prepared parts that it reads."""
MOST_LINES = 60
_LAST_LINES = 12  # of what a stage printed, in its last row where it did not end well
_MOST_FAILURES = 6
_PARTS = ("q+k+v", "o", "gate+up", "down", "lm_head", "attention")


def measure(prepared: Path, out: Path, stages: dict[str, int], resume: Path | None) -> int:
    """Run stages in order, each for its limit in seconds at most, and report them. Return 0 where all passed, else 1.

    A stage that is complete in the results `resume`, of the same inputs on the same card, is copied from there.
    """
    if len(cubins := list(prepared.glob("cubins/*.engine.*.cubin"))) != 1:
        reason = f"{prepared}/cubins has kernels of {len(cubins)} sources, not of one"
        raise OutriderError(f"{reason}; remove it if it is there, and run python -m outrider.tools.lab.gpu.prepare")
    found, card = dict[str, list[Row]](), device_name()
    out.mkdir(parents=True, exist_ok=True)
    for name, limit in stages.items():
        path = out / f"{name}.jsonl"
        parts = [prepared / part for part in STAGES[name][1]]
        files = [file for part in parts for file in (part, *part.rglob("*")) if file.is_file()]
        measured = {"card": card, "inputs": files_sha256({str(file.relative_to(prepared)): file for file in files})}
        rows = read_rows(resume / path.name) if resume else []
        if rows and rows[-1].items() >= {"status": "complete", **measured}.items():
            stdout.print(f"{name}: complete before", markup=False)
        else:
            path.unlink(missing_ok=True)
            end = run_stage([name, prepared, out], out / "log.txt", limit)
            rows = read_rows(path)
            if failed := sum(row.get("passed") is False for row in rows):
                end["status"] += f", failed in {failed} rows"
            rows.append({**end, **measured})
            stdout.print(f"{name}: {end['status']}, {end['seconds']} s", markup=False)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        found[name] = rows
        text = "\n".join([f"# {card}", *report(found)])
        (out / "report.md").write_text(f"{text}\n", encoding="utf-8")
    stdout.print(text, markup=False, soft_wrap=True)
    return 0 if all(rows[-1]["status"] == "complete" for rows in found.values()) else 1


def run_stage(arguments: list[object], log: Path, limit: int) -> Row:
    """Run a stage for at most `limit` seconds, and return how it ended; what it has started is killed with it, also
    where this is interrupted."""
    command = [sys.executable, "-X", "faulthandler", "-m", "outrider.tools.lab.gpu.stages", *map(str, arguments)]
    began, code = monotonic(), None
    with log.open("a", encoding="utf-8") as file:
        print(*command, file=file, flush=True)
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
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
    lines = []
    for step in (row for row in rows if row["what"] == "step"):
        key = ("kernel", step["model"], step["rows"])
        own = [row for row in rows if (row["what"], row.get("model"), row.get("rows")) == key]
        shown = {row["part"]: f"{row['us']:.1f} ({row['share']:.0%})" for row in reversed(own)}
        cells = [step["model"], step["rows"], f"{step['ms']:.3f}", step["launches"], f"{step['moved'] / 1e9:.2f}"]
        cells += [f"{step['share']:.0%}", f"{sum(row['ms'] for row in own):.3f}"]
        lines.append([*cells, *(shown.get(part, "") for part in _PARTS)])
    yield from (f"{line}: in every time of a graph below" for line in _plain(rows[:1]))
    yield from markdown_table(heads, lines)


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: measure(**vars(_parser().parse_args(given))))


def _limits(text: str) -> dict[str, int]:
    """Parse stages with commas, each with its limit where it has one of its own."""
    words = [word.partition("=") for word in text.split(",")]
    if unknown := [name for name, *_ in words if name not in STAGES]:
        raise argparse.ArgumentTypeError(f"is {unknown[0]!r}; choose from {', '.join(STAGES)}")
    return {name: at_least_1(seconds) if seconds else STAGES[name][0] for name, _, seconds in words}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.gpu.measure", epilog="example: %(prog)s --out results --stages env,smoke=20",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--prepared", type=Path, default=Path(".gpu"), help="what tools.lab.gpu.prepare wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stages", type=_limits, default=",".join(STAGES), help="NAME or NAME=SECONDS, with commas")
    parser.add_argument("--resume", type=Path, help="earlier results: stages complete there are not run again")
    return parser


if __name__ == "__main__":
    sys.exit(main())
