"""Output of tools that measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.commands.console import print_json, stdout

_NAMES = ("drafter", "mode", "way", "what", "scaling")  # columns that are no figures


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A number by its format and with its unit; "-" where there is no such figure."""
    return "-" if value is None else f"{value:{form}}{unit}"


def print_report(report: dict[str, Any], as_json: bool, print_table: Callable[[dict[str, Any], Console], None]) -> int:
    """One JSON object, or a table. The command's exit status."""
    if as_json:
        print_json(report)
    else:
        print_table(report, stdout)
    return 0


def print_head(report: dict[str, Any], console: Console) -> None:
    """What a report of `identity_columns` was measured with, and where."""
    machine = report["machine"]
    console.print(
        f"{report['device']}, {machine['cores']} cores, {report['threads']} threads; {report['backend']} "
        f"({report['backend_version']}), {report['dtype']}; commit {report['git_sha']}, plan {report['identity'][:12]}"
    )


def make_table(*heads: str) -> Table:
    """A table without lines: names on the left, figures on the right."""
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in _NAMES else "right", no_wrap=True)
    return table


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table in Markdown; a cell stands on one line, and no bar in it ends it."""
    cells = ([" ".join(str(cell).splitlines()).replace("|", r"\|") for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)]
