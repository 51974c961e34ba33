"""What a comparison of products prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console

from outrider.tools.lab.matmul.measure import OURS
from outrider.tools.measuring import Column, make_table


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    versions = ", ".join(f"{engine} {version}" for engine, version in report["versions"].items())
    console.print(f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads each; {versions}")
    console.print(
        f"milliseconds of all products in one pass: minimum (median) of {report['reps']} turns of {report['passes']}"
        " passes; ratio: our minimum over theirs (median of pairs of turns)"
    )
    for shape, weights in report["weights"].items():
        for kind in dict.fromkeys(row["type"] for row in report["rows"]):
            rows = [row for row in report["rows"] if (row["shape"], row["type"]) == (shape, kind)]
            engines = list(dict.fromkeys(row["engine"] for row in rows))
            lines = [
                {"rows": count, **{row["engine"]: row for row in rows if row["rows"] == count}}
                for count in dict.fromkeys(row["rows"] for row in rows)
            ]
            columns = [
                Column("rows", "rows"),
                *(Column(engine, _cell(engine, "min_ms", "median_ms")) for engine in engines),
                *(Column(f"ours / {e}", _cell(e, "ratio", "median_ratio")) for e in engines if e != OURS),
                Column("ours / fewest rows", lambda line: line[OURS]["against_first"], ".2f"),
            ]
            console.print(f"\n{shape}, {kind}: {weights / 1e6:.0f}M weights")
            console.print(make_table(columns, lines))
    for absent in report["missing"]:
        console.print(f"missing: {absent['engine']}: {absent['reason']}", markup=False)


def _cell(engine: str, first: str, second: str) -> Callable[[dict[str, Any]], str]:
    return lambda line: f"{line[engine][first]:.2f} ({line[engine][second]:.2f})"
