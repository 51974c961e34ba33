"""What this machine's GPU shows: `python -m tools.gpu_report [--out tools/results] [--shapes 1b,8b] [--budget 540]`.

In order: the speed of copies on the device; the tests marked `gpu`; the reference plan on every backend that runs here,
with every drafter, with and without CUDA graphs, its tokens against those of the CPU in float32 and of its own plain
decoding (`cuda` computes in bfloat16, and may part from the CPU's); random Llama-shaped models, whose share of
the copy speed says how near plain decoding comes to reading the weights once a token. Writes one JSON and one Markdown
file, with date, machine and command, anew after every stage. The same command goes on with the stages that the file of
the same GPU and date lacks; with a budget of seconds it begins none that takes longer than what is left, and says how
to go on. `tools/gpu_figures.py` says what each figure is.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports, which take a second
    from commands.process import begin

    begin()

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from commands.arguments import Parser, at_least_1
from commands.console import guarded, stdout
from plans.errors import OutriderError
from runtime.backends.cuda_driver import architecture, call, device_name, driver
from tools.gpu_figures import (
    CPU,
    GPU_BACKENDS,
    SHAPES,
    WEIGHTS,
    build_reference,
    build_shape,
    copy_speed,
    reference_on_cpu,
    reference_rows,
    shape_figures,
    write_random_llama,
)
from tools.gpu_stages import Report, Stage, run_stages, seconds_needed

ROOT = Path(__file__).resolve().parent.parent
_WEIGHTS, _BUILD, _FIGURES = 12, 20, 15  # seconds for each GB of weights: written, built, loaded and run


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
        "ops", "same runs", "as plain", "margins",
    )  # fmt: skip
    shapes = (
        "model", "backend", "weights", "graphs", "tokens/s", "round ms", "host", "launches", "ops", "read GB/s",
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
        f"{row['ops_share']:.1%}" if "ops_share" in row else "", f"{row['same_runs']} of {row['runs']}",
        f"{row['as_plain']} of {row['runs']}", margins,
    ]  # fmt: skip


def _shape_cells(row: dict[str, Any]) -> list[str]:
    verify = ", ".join(f"{tokens}: {ms:.2f}" for tokens, ms in row["verify_ms"].items())
    return [
        row["model"], row["backend"], row["weights"], _yes(row["cuda_graphs"]), f"{row['tokens_per_second']:.1f}",
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


def stages_of(arguments: Namespace, work: Path) -> Iterator[Stage]:
    """Yield the stages of a report, in order; those that make files make them in `work`."""
    yield Stage("copies", 15, lambda report: copy_speed(), "copy_gb_s")
    yield Stage("tests marked gpu", 180, lambda report: run_tests(), "tests")
    yield from _reference_stages(arguments.prompts, arguments.new, work / "reference")
    for name in filter(None, arguments.shapes.split(",")):
        yield from _shape_stages(name, arguments.weights.split(","), arguments.new, work)


def _reference_stages(prompts: int, new: int, folder: Path) -> Iterator[Stage]:
    def building(backend: str) -> str:
        return f"building the reference plan for {backend}"

    def on_cpu(report: Report) -> list[dict[str, Any]]:
        rows, report["expected"] = reference_on_cpu(folder, prompts, new)
        return rows

    def on_gpu(backend: str, graphs: bool, report: Report) -> list[dict[str, Any]]:
        return reference_rows(folder, backend, graphs, prompts, new, report["expected"])

    for backend in (CPU, *GPU_BACKENDS):
        yield _making(building(backend), 60, folder / backend, partial(build_reference, folder, backend))
        if backend == CPU:
            yield Stage(f"reference plan, {CPU}", 60, on_cpu, "reference", (building(CPU),))
            continue
        for graphs in (True, False):
            yield Stage(
                f"reference plan, {backend}, {_graphs(graphs)}",
                60,
                partial(on_gpu, backend, graphs),
                "reference",
                (building(CPU), f"reference plan, {CPU}", building(backend)),
                failed=partial(_failed_row, {"backend": backend, "cuda_graphs": graphs}),
            )


def _shape_stages(name: str, kinds: list[str], new: int, work: Path) -> Iterator[Stage]:
    shape, checkpoint, writing = SHAPES[name], work / name, f"writing the random model {name}"
    size = shape.read_bytes("bfloat16") / 1e9
    # A reader of the folder finds all of the checkpoint, or none.
    yield _making(
        writing, 20 + _WEIGHTS * size, checkpoint, lambda: _whole(partial(write_random_llama, shape), checkpoint)
    )

    def figures(plan: Path, building: str, row: dict[str, Any], report: Report) -> list[dict[str, Any]]:
        built, read = report["stages"].get(building, {}).get("seconds"), shape.read_bytes(row["weights"])
        found = shape_figures(plan, read, report["copy_gb_s"], new, row["cuda_graphs"])
        return [row | {"weights_gb": read / 1e9, "build_seconds": built} | found]

    for backend, weights in product(GPU_BACKENDS, kinds):
        plan, building = work / f"{name}-{backend}-{weights}", f"building {name} in {weights} for {backend}"
        make = partial(build_shape, checkpoint, backend, weights, plan)
        yield _making(building, 30 + _BUILD * size, plan, make, (writing,))
        for graphs in (True, False):
            row = {"model": name, "backend": backend, "weights": weights, "cuda_graphs": graphs}
            yield Stage(
                f"model {name} in {weights}, {backend}, {_graphs(graphs)}",
                40 + _FIGURES * size,
                partial(figures, plan, building, row),
                "shapes",
                (building,),
                failed=partial(_failed_row, row),
            )


def _making(name: str, seconds: float, folder: Path, make: Callable[[], None], needs: tuple[str, ...] = ()) -> Stage:
    def take(report: Report) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make()

    return Stage(name, seconds, take, needs=needs, made=folder.is_dir, drop=partial(shutil.rmtree, folder))


def _whole(make: Callable[[Path], None], folder: Path) -> None:
    """Let `make` write a folder that has its name only when it is whole."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make(part)
    part.rename(folder)


def _failed_row(row: dict[str, Any], error: str) -> list[dict[str, Any]]:
    return [row | {"error": error}]


def _graphs(graphs: bool) -> str:
    return "with graphs" if graphs else "without graphs"


def main(given: list[str] | None = None) -> int:
    return guarded(lambda: _run(sys.argv[1:] if given is None else given))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tools.gpu_report",
        description=__doc__,
        epilog="example: %(prog)s --shapes 1b --weights bfloat16,int4 --out tools/results",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tools" / "results", help="folder of the two files")
    parser.add_argument("--shapes", default="1b", help=f"of {', '.join(SHAPES)}, with commas; empty for none")
    parser.add_argument(
        "--weights", default="bfloat16", help=f"of the shapes: of {', '.join(WEIGHTS)}, with commas (default bfloat16)"
    )
    parser.add_argument(
        "--prompts", type=at_least_1, default=8, help="held-out prompts on the reference plan (default 8)"
    )
    parser.add_argument("--new", type=at_least_1, default=128, help="tokens of each run (default 128)")
    parser.add_argument("--budget", type=at_least_1, help="seconds that this call may take (default: no limit)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu-report", help="folder of plans, kept until the report ends"
    )
    return parser


def _command(arguments: Namespace) -> str:
    """The command of a report, whatever its budget: the options that decide what is measured."""
    return " ".join(["python -m tools.gpu_report", *_given(arguments, "shapes", "weights", "prompts", "new")])


def _given(arguments: Namespace, *names: str) -> Iterator[str]:
    """Yield the options of `names` that have other values than by default, as they are typed."""
    for name in names:
        if (value := getattr(arguments, name)) != _parser().get_default(name):
            yield f"--{name} {shlex.quote(str(value))}"


def _begin(arguments: Namespace, path: Path) -> Report:
    """Return the report that the file at `path` holds, or an empty one. Raises `OutriderError` for another's."""
    head = {
        "date": str(date.today()),
        "command": _command(arguments),
        "gpu": device_name(),
        "architecture": architecture(),
        "driver": call("cuDriverGetVersion"),
    }
    if not path.exists():
        return head | {
            "shapes": [],
            "reference": [],
            "tests": {"summary": "not run"},
            "copy_gb_s": 0.0,
            "errors": [],
            "stages": {},
            "begun": {},
        }
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    for key, own in head.items():
        if report.get(key) != own:
            raise OutriderError(
                f"{path} holds a report whose {key} is {report.get(key)!r}, and here it is {own!r}; give --out another "
                "folder, or move the file away"
            )
    return report


def _run(given: list[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(given)
    for option, asked, known in (
        ("--shapes", filter(None, arguments.shapes.split(",")), SHAPES),
        ("--weights", arguments.weights.split(","), WEIGHTS),
    ):
        if unknown := [name for name in asked if name not in known]:
            parser.error(
                f"argument {option}: there is no {', '.join(map(repr, unknown))}; choose of {', '.join(known)}"
            )
    try:
        driver()
    except OutriderError as error:
        raise OutriderError(f"no report: {error}") from None
    name = f"gpu-{date.today()}-{architecture()}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{name}.json"
    report = _begin(arguments, path)
    stages = list(stages_of(arguments, arguments.work / name))

    def save() -> None:
        part = path.with_suffix(".part")  # a machine may go in the middle
        part.write_text(json.dumps(report, indent=1), encoding="utf-8")
        part.replace(path)
        path.with_suffix(".md").write_text(markdown(report), encoding="utf-8")

    left = run_stages(stages, report, arguments.budget, save, stdout.print)
    save()
    stdout.print(markdown(report))
    if not left:
        shutil.rmtree(arguments.work / name, ignore_errors=True)
    else:
        longest = max(seconds_needed(stage, report) for stage in left)
        stdout.print(f"{len(left)} of {len(stages)} stages are open: {'; '.join(stage.name for stage in left)}.")
        stdout.print(f"The longest takes about {longest:.0f} seconds. Go on with:")
        stdout.print(f"    {' '.join([report['command'], *_given(arguments, 'out', 'work', 'budget')])}")
    return 1 if report["errors"] or report["tests"].get("status", 0 if left else 1) else 0


if __name__ == "__main__":
    sys.exit(main())
