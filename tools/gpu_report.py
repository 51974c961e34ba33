"""What this machine's GPU shows: `python -m tools.gpu_report [--out tools/results] [--shapes 1b,8b]`.

In order: the tests marked `gpu`; the speed of copies on the device; the reference plan on every backend that runs here,
with every drafter, with and without CUDA graphs, its tokens against the CPU's; random Llama-shaped models, whose share
of the copy speed says how near plain decoding comes to reading the weights once a token. Writes one JSON and one
Markdown file, with date, machine and command, anew after every step. `tools/gpu_figures.py` says what each figure is.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from commands.arguments import Parser, at_least_1
from commands.console import guarded, stdout
from plans.errors import OutriderError
from runtime.backends.cuda_driver import architecture, call, device_name, driver
from tools.gpu_figures import SHAPES, copy_speed, reference_rows, shape_rows

ROOT = Path(__file__).resolve().parent.parent


def run_tests() -> dict[str, Any]:
    """`pytest -m gpu`: its last line, and its exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"status": done.returncode, "summary": lines[-1] if lines else "", "failed": _failures(lines)}


def _failures(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("FAILED", "ERROR"))]


def markdown(report: dict[str, Any]) -> str:
    lines = [
        f"# {report['gpu']}, {report['date']}",
        "",
        f"    {report['command']}",
        "",
        f"- driver {report['driver']}, {report['architecture']}; copies on the device {report['copy_gb_s']:.0f} GB/s",
        f"- tests marked gpu: {report['tests']['summary']}",
        *(f"- failed: {error}" for error in report["errors"]),
        "",
    ]
    reference = (
        "backend", "graphs", "drafter", "tokens/s", "tokens/verify", "round ms", "device ms", "host ms", "launches",
        "ops", "same runs", "margins",
    )  # fmt: skip
    shapes = (
        "model", "backend", "dtype", "graphs", "tokens/s", "round ms", "host", "launches", "ops", "read GB/s",
        "of copies' GB/s", "n-grams: tokens/s", "n-grams: tokens/verify", "ms by tokens of a round",
    )  # fmt: skip
    lines += _table(reference, _reference_cells, report["reference"])
    lines += _table(shapes, _shape_cells, report["shapes"])
    return "\n".join(lines)


def _reference_cells(row: dict[str, Any]) -> list[str]:
    margins = ", ".join(f"{parting['margin']:.1e}" for parting in row["partings"])
    return [
        row["backend"], _yes(row["cuda_graphs"]), row["drafter"], f"{row['tokens_per_second']:.0f}",
        f"{row['tokens_per_verify']:.2f}", f"{row['round_ms']:.3f}", f"{row['device_ms']:.3f}",
        f"{row['host_ms']:.3f}", str(row.get("launches", "")),
        f"{row['ops_share']:.1%}" if "ops_share" in row else "", f"{row['same_runs']} of {row['runs']}", margins,
    ]  # fmt: skip


def _shape_cells(row: dict[str, Any]) -> list[str]:
    verify = ", ".join(f"{tokens}: {ms:.2f}" for tokens, ms in row["verify_ms"].items())
    return [
        row["model"], row["backend"], row["dtype"], _yes(row["cuda_graphs"]), f"{row['tokens_per_second']:.1f}",
        f"{row['round_ms']:.2f}", f"{row['host_share']:.1%}", str(row["launches"] or ""), f"{row['ops_share']:.1%}",
        f"{row['read_gb_per_second']:.0f}",
        f"{row['share_of_copy']:.0%}", f"{row['ngram']['tokens_per_second']:.1f}",
        f"{row['ngram']['tokens_per_verify']:.2f}", verify,
    ]  # fmt: skip


def _yes(graphs: bool) -> str:
    return "yes" if graphs else "no"


def _table(
    columns: tuple[str, ...], cells: Callable[[dict[str, Any]], list[str]], rows: list[dict[str, Any]]
) -> list[str]:
    """Markdown; a row with an `error` says that alone."""
    filled = []
    for row in rows:
        line = [str(row.get(columns[0], "")), row["error"]] if "error" in row else cells(row)
        filled.append(line + [""] * (len(columns) - len(line)))
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *filled)] + [""]


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu_report",
        description=__doc__,
        epilog="example: %(prog)s --shapes 1b --out tools/results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results", help="folder of the two files")
    parser.add_argument("--shapes", default="1b", help=f"of {', '.join(SHAPES)}, with commas; empty for none")
    parser.add_argument("--dtypes", default="bfloat16", help="of the shapes: bfloat16, float16, or both with a comma")
    parser.add_argument(
        "--prompts", type=at_least_1, default=8, help="held-out prompts on the reference plan (default 8)"
    )
    parser.add_argument("--new", type=at_least_1, default=128, help="tokens of each run (default 128)")
    return parser


def _run(given: list[str]) -> int:
    arguments = _parser().parse_args(given)
    try:
        driver()
    except OutriderError as error:
        raise OutriderError(f"no report: {error}") from None
    report: dict[str, Any] = {
        "date": str(date.today()),
        "command": "python -m tools.gpu_report " + " ".join(given),
        "gpu": device_name(),
        "architecture": architecture(),
        "driver": call("cuDriverGetVersion"),
        "shapes": [],
        "reference": [],
        "tests": {"summary": "not run"},
        "copy_gb_s": 0.0,
        "errors": [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu-{report['date']}-{report['architecture']}"

    def save(step: str, key: str, take: Callable[[], Any]) -> None:
        """Every step is kept as soon as it is there: a machine may be taken back. One that fails is told."""
        stdout.print(f"{step} ...")
        try:
            report[key] = report[key] + found if isinstance(found := take(), list) else found
        except Exception as error:
            report["errors"].append(f"{step}: {type(error).__name__}: {error}")
        path.with_suffix(".json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")

    save("copies", "copy_gb_s", copy_speed)
    save("tests", "tests", run_tests)
    with TemporaryDirectory(prefix="outrider-gpu-") as folder:
        save("reference plan", "reference", lambda: reference_rows(Path(folder), arguments.prompts, arguments.new))
        for name in filter(None, arguments.shapes.split(",")):
            dtypes, copies = arguments.dtypes.split(","), report["copy_gb_s"]
            take = partial(shape_rows, name, Path(folder), copies, arguments.new, dtypes)
            save(f"model {name}", "shapes", take)
    stdout.print(path.with_suffix(".md").read_text(encoding="utf-8"))
    return 1 if report["errors"] or report["tests"].get("status", 1) else 0


if __name__ == "__main__":
    sys.exit(main())
