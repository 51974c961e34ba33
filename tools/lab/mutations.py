"""How many small faults the tests find: `python -m outrider.tools.lab.mutations [--count 60] [--seed 0] [--root DIR]`.

Each mutation changes one operator, number or condition of a file that decides tokens, and the tests that cover the file
run until the first of them fails. One that no test finds is listed with its line. Files of the checkout are changed and
restored: run it in a clone of its own, with an environment. The same seed changes the same places of the same files.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.commands.arguments import Parser, at_least_0, at_least_1
from outrider.commands.console import progress_bar
from outrider.plans.errors import RequestError
from outrider.tools.measuring import Column, make_table, run_tool

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = {
    ("runtime/rounds/*.py", "runtime/step_loop.py", "runtime/shared_prefix.py", "runtime/engine.py"): [
        "same_tokens", "features", "branches", "rules", "launched_rounds", "scheduler", "random_use", "step", "cuts",
    ],
    ("runtime/scheduler.py", "runtime/request_queue.py"): [
        "scheduler", "scheduler_limits", "features", "random_use", "scheduler_one_branch",
    ],
    ("runtime/kv/cache.py",): [
        "branches", "drafts", "features", "random_use", "kept_slots", "branch_slots", "branch_rows",
    ],
    ("runtime/drafters/engine*.py",): [
        "drafts", "same_tokens", "features", "rejection", "drafter_grid", "draft_options",
    ],
    ("runtime/text/stream.py",): ["generate", "runtime/test_text_stream", "runtime/test_text_families"],
    ("plans/check.py",): ["plans/test_plan", "plans/test_manifest"],
}  # fmt: skip
"""The mutated files, by their patterns now and before, and the tests that cover each, now and before: of
`tests/integration`, or paths."""
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
_SECONDS = 400  # of the tests of one mutation; more counts as found


@dataclass(frozen=True)
class Mutation:
    """A line of a file as it was, as it becomes, and whether a test failed."""

    file: str
    line: int
    before: str
    after: str
    found: bool = False


def mutations(source: str, places: Iterable[int] | None = None) -> Iterator[tuple[int, str]]:
    """Yield mutations of a module, all or those of some places: the number of the line, and the module's source."""
    for place in range(count_places(source)) if places is None else places:
        tree = ast.parse(source)
        node, change = list(_places(tree))[place]
        change()
        yield node.lineno, ast.unparse(tree)


def count_places(source: str) -> int:
    """Return how many mutations a module has."""
    return sum(1 for _ in _places(ast.parse(source)))


def _places(tree: ast.AST) -> Iterator[tuple[Any, Any]]:
    """Yield each node that can be changed, and the function that changes it; annotations and texts stay."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in _SWAPS:
                yield node, lambda node=node: node.ops.__setitem__(0, _SWAPS[type(node.ops[0])]())
            case ast.BoolOp() | ast.BinOp() if type(node.op) in _SWAPS:
                yield node, lambda node=node: setattr(node, "op", _SWAPS[type(node.op)]())
            case ast.Constant(value=value) if type(value) is int:
                yield node, lambda node=node: setattr(node, "value", node.value + 1)
            case ast.If() | ast.IfExp() | ast.While():
                yield node, lambda node=node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))


def choose(root: Path, count: int, seed: int) -> Iterator[tuple[Path, list[str], int, str]]:
    """Yield `count` mutations of the files of a checkout, equally many of each: file, its tests, line, source."""
    for place, (patterns, tests) in enumerate(FILES.items()):
        files = sorted(file for pattern in patterns for file in root.glob(pattern))
        if not files:
            raise RequestError(f"{root} has none of {', '.join(patterns)}; pass the folder of a checkout.")
        sources = {file: file.read_text("utf-8") for file in files}
        every = [(file, at) for file, source in sources.items() for at in range(count_places(source))]
        share = count // len(FILES) + (place < count % len(FILES))
        paths = [f"tests/{test}.py" if "/" in test else f"tests/integration/test_{test}.py" for test in tests]
        for file, at in random.Random(seed).sample(every, min(share, len(every))):
            ((line, mutated),) = mutations(sources[file], [at])
            yield file, [path for path in paths if (root / path).is_file()], line, mutated


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of each mutation. Raises RequestError for a folder that is no checkout."""
    root = options.root.resolve()
    chosen = list(choose(root, options.count, options.seed))
    rows = []
    with progress_bar("mutating") as progress:
        for place, (file, tests, line, source) in enumerate(chosen):
            progress(place, len(chosen), f"{file.relative_to(root)}:{line}")
            rows.append(asdict(_run(root, file, tests, line, source)))
    return {"count": len(rows), "seed": options.seed, "found": sum(row["found"] for row in rows), "rows": rows}


def _run(root: Path, file: Path, tests: Sequence[str], line: int, source: str) -> Mutation:
    original = file.read_text("utf-8")
    before = ast.unparse(ast.parse(original)).splitlines()
    after = next((b for a, b in zip(before, source.splitlines(), strict=False) if a != b), "")
    command = [str(root / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    try:
        file.write_text(source, "utf-8")
        ended = subprocess.run(command, cwd=root, capture_output=True, timeout=_SECONDS)
        found = ended.returncode != 0
    except subprocess.TimeoutExpired:
        found = True
    finally:
        file.write_text(original, "utf-8")
    name = file.relative_to(root).as_posix()
    return Mutation(name, line, original.splitlines()[line - 1].strip(), after.strip(), found)


def print_table(report: dict[str, Any], console: Console) -> None:
    console.print(
        f"{report['found']} of {report['count']} mutations found, seed {report['seed']}; those that were not:"
    )
    columns = [Column(key, key, text=key != "line") for key in ("file", "line", "before", "after")]
    console.print(make_table(columns, [row for row in report["rows"] if not row["found"]], narrow=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement."""
    return run_tool(_parser, arguments, measure, print_table)


def _parser() -> Parser:
    parser = Parser(prog="python -m outrider.tools.lab.mutations", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--count", type=at_least_1, default=60, help="mutations of all files (default 60)")
    parser.add_argument("--seed", type=at_least_0, default=0, help="which ones (default 0)")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the checkout, with a .venv (default: this one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
