"""What a comparison of products prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from outrider.tools.lab.matmul.measure import OURS
from outrider.tools.output import figure, make_table


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
            heads = [*engines, *(f"ours / {engine}" for engine in engines if engine != OURS), "ours / fewest rows"]
            table = make_table("rows", *heads)
            for count in dict.fromkeys(row["rows"] for row in rows):
                by_engine = {row["engine"]: row for row in rows if row["rows"] == count}
                times = [f"{row['min_ms']:.2f} ({row['median_ms']:.2f})" for row in by_engine.values()]
                ratios = [
                    f"{figure(row['ratio'], '.2f')} ({figure(row['median_ratio'], '.2f')})"
                    for row in by_engine.values()
                    if row["ratio"] is not None
                ]
                table.add_row(str(count), *times, *ratios, f"{by_engine[OURS]['against_first']:.2f}")
            console.print(f"\n{shape}, {kind}: {weights / 1e6:.0f}M weights")
            console.print(table)
    for absent in report["missing"]:
        console.print(f"missing: {absent['engine']}: {absent['reason']}", markup=False)
