"""A bundle in fresh processes: its size by component, what each stage takes and holds, and which modules it imports.

A stage's milliseconds are by the clock; those of the processors besides say how much of them was waiting. Every process
has an empty environment but for a cache folder of its own: the first of a pair finds it empty, and so probes the plan
on this machine; the second does not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from outrider.commands.arguments import Parser
from outrider.plans.errors import OutriderError, RequestError
from outrider.plans.plan import read_manifest
from outrider.runtime.embed.build import Compilers
from outrider.runtime.embed.bundle.bundle import LIST
from outrider.tools.measuring import Column, add_arguments, make_table, run_in_turn, run_tool

SOURCE = Path(__file__).resolve().parent / "bundle.c"
PROMPT = "def main():\n"
STAGES = ("first_call", "open", "first_token", "second_token")
_COLUMNS = ("ms", "processor_ms", "modules", "pss_kb", "peak_rss_kb")
_TABLE = (
    Column("", "kind", text=True),
    Column("", "stage", text=True),
    Column("median ms", "ms", ".0f"),
    Column("lowest", "lowest_ms", ".0f"),
    Column("highest", "highest_ms", ".0f"),
    Column("processor ms", "processor_ms", ".0f"),
    Column("modules", "modules", ".0f"),
    Column("PSS MB", "pss_kb", ".0f", per=1e3),
    Column("peak MB", "peak_rss_kb", ".0f", per=1e3),
)
_LARGEST = 8
"""Components that the table shows one by one."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians over `reps` pairs of processes after one that warms the file cache.

    Raises `RequestError` for a folder that is no bundle, `OutriderError` where a process fails.
    """
    bundle = options.bundle.resolve()
    if not (bundle / LIST).is_file():
        raise RequestError(f"{options.bundle} is no bundle; make one with `outrider embed --bundle DIR`.")
    manifest = read_manifest(options.plan)
    kinds = ("unknown machine", "known machine")
    with TemporaryDirectory(prefix="outrider-bundle-") as folder:
        program, cache, names = _compile(bundle, Path(folder)), Path(folder) / "cache", Path(folder) / "modules"

        def pair(*_: object) -> list[dict[str, list[float]]]:
            """Run where the cache is empty, and where it is not."""
            stages = [_run(program, options.plan.resolve(), cache, names) for _ in kinds]
            shutil.rmtree(cache)
            return stages

        pairs = run_in_turn(["a pair of processes"], [None], options.reps, pair)["a pair of processes"]
        found = dict(zip(kinds, zip(*pairs, strict=True), strict=True))
        modules = names.read_text(encoding="utf-8").split()
    listed = json.loads((bundle / LIST).read_text(encoding="utf-8"))
    ready = [rows["first_call"][0] + rows["open"][0] for rows in found["known machine"]]
    return {
        "plan": str(options.plan),
        "identity": manifest.identity,
        "reps": options.reps,
        "bytes": sum(path.lstat().st_size for path in bundle.rglob("*") if not path.is_dir()),
        "components": {each["name"]: each["bytes"] for each in listed["components"]},
        "modules": dict(Counter(name.partition(".")[0] for name in modules).most_common()),
        "ready_ms": {"median": median(ready), "lowest": min(ready), "highest": max(ready)},
        "stages": {kind: _medians(rows) for kind, rows in found.items()},
    }


def _compile(bundle: Path, folder: Path) -> Path:
    program, lib = folder / "program", bundle / "lib"
    Compilers(()).run(
        "C", "-std=gnu11", f"-I{bundle / 'include'}", SOURCE, "-o", program, f"-L{lib}", "-loutrider",
        f"-Wl,-rpath,{lib}", "-ldl",
    )  # fmt: skip
    return program


def _run(program: Path, plan: Path, cache: Path, names: Path) -> dict[str, list[float]]:
    ended = subprocess.run(
        [program, plan, PROMPT, names], env={"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        raise OutriderError(f"the bundle fails on {plan}: {said[-1]}")
    lines = [line.split() for line in ended.stdout.splitlines()]
    return {words[0]: [float(word) for word in words[1:]] for words in lines}


def _medians(rows: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {
        stage: {
            column: median(row[stage][place] for row in rows) for place, column in enumerate(_COLUMNS)
        } | {"lowest_ms": min(row[stage][0] for row in rows), "highest_ms": max(row[stage][0] for row in rows)}
        for stage in STAGES
    }  # fmt: skip


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; plan {report['identity'][:12]}, {report['reps']} pairs of "
        "fresh processes, files cached"
    )
    largest = sorted(report["components"].items(), key=lambda item: -item[1])
    shown = [f"{name} {size / 1e6:.1f}" for name, size in largest[:_LARGEST]]
    rest = sum(size for _, size in largest[_LARGEST:])
    console.print(f"{report['bytes'] / 1e6:.1f} MB: {', '.join(shown)}, others {rest / 1e6:.1f}")
    packages = list(report["modules"].items())
    console.print(
        f"{sum(report['modules'].values())} modules imported: "
        + ", ".join(f"{name} {count}" for name, count in packages[:_LARGEST])
    )
    rows = [
        {"kind": kind, "stage": stage.replace("_", " "), **row}
        for kind, stages in report["stages"].items()
        for stage, row in stages.items()
    ]
    console.print(make_table(_TABLE, rows))
    ready = report["ready_ms"]
    console.print(
        f"first call and open together, where the plan has run before: {ready['median']:.0f} ms "
        f"({ready['lowest']:.0f} to {ready['highest']:.0f})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m outrider.tools.lab.bundle",
        description="Start fresh processes of a C program that has nothing but a bundle (`outrider embed "
        "--bundle DIR`): its size by component, the modules that it imports, and of the first call, opening the plan "
        "and the first and second token the time, the processors' time and the memory. Medians and spread, where the "
        "plan has run before and where it has not.",
        epilog="example: %(prog)s build/bundle build/reference --reps 9",
    )
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    add_arguments(parser, "plan reps json", reps=9)
    return parser


if __name__ == "__main__":
    sys.exit(main())
