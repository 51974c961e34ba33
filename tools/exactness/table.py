"""The table of divergences, for a reader."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.measuring import Column, make_table


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print a report of `measure` or `measure_server`: a row a condition, then the first divergence of each."""
    rows, columns = report["rows"], [_AROUND, Column("condition", "condition", text=True), *_COUNTS]
    if any(row["witness"] for row in rows):
        columns.append(Column("seen", lambda row: _seen(row["witness"]), text=True))
    before = [None, *(row["group"] for row in rows)]
    shown = [
        row | {"around": row["group"] if row["group"] != last else ""} for row, last in zip(rows, before, strict=False)
    ]
    _print(report, make_table(columns, shown, narrow=True), rows, console)


def print_groups(report: dict[str, Any], console: Console) -> None:
    """Print a row for every group of conditions, then the first divergence of each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(row["group"], []).append(row)
    shown, firsts = list[dict[str, Any]](), list[dict[str, Any]]()
    for group, rows in groups.items():
        whole = {name: sum(row[name] for row in rows) for name in ("requests", "diverged", "logprobs_diverged")}
        untold = all(row.get("without_logprobs") for row in rows)
        shown.append({"around": group, "conditions": len(rows), **whole, "without_logprobs": untold})
        firsts += next(([row] for row in rows if row["first"] or row["first_of_logprobs"]), [])
    _print(report, make_table([_AROUND, Column("conditions", "conditions"), *_COUNTS], shown), firsts, console)


_AROUND = Column("around", "around", text=True)
_COUNTS = (
    Column("requests", "requests"),
    Column("diverged", "diverged"),
    Column("logprobs", lambda row: None if row.get("without_logprobs") else row["logprobs_diverged"]),
)


def _print(report: dict[str, Any], table: Table, rows: list[dict[str, Any]], console: Console) -> None:
    """Print the head, the table, the first divergences of `rows`, what was left out, and the verdict."""
    machine = report["machine"]
    head = f"{machine['processor']}, {machine['cores']} cores; commit {report['git_sha']}; {report['about']}"
    console.print(head, soft_wrap=True, markup=False)
    console.print(table)
    for row in rows:
        for name, what in (("first", "other tokens"), ("first_of_logprobs", "other logprobs")):
            if row[name] is not None:
                said = f"{row['group']}, {row['condition']}: first with {what}: {row[name]['text']}"
                console.print(said, soft_wrap=True, markup=False)
    for each in report["left_out"]:
        console.print(f"left out: {each['what']}: {each['reason']}", soft_wrap=True, markup=False)
    console.print(_verdict(report), soft_wrap=True)


def _seen(witness: dict[str, int] | None) -> str:
    """What shows that a condition was what it says: tokens a pass of the target, and tokens not computed again."""
    if witness is None:
        return "-"
    found = [f"{witness['tokens'] / max(1, witness['passes']):.1f} a pass"] if "passes" in witness else []
    shown = ("reused", "resumed") if "passes" in witness else ("accepted", "reused")
    found += [f"{witness[name]} {name}" for name in shown if witness[name]]
    return ", ".join(found) or "-"


def _verdict(report: dict[str, Any]) -> str:
    total, failed = sum(row["requests"] for row in report["rows"]), report.get("failed_at_first")
    more = f"; of the first answers, {failed} of {report['requests']} were errors" if failed else ""
    if not report["diverged"]:
        return f"no divergence in {len(report['rows'])} conditions, {total} requests{more}"
    tokens = sum(row["diverged"] for row in report["rows"])
    logprobs = sum(row["logprobs_diverged"] for row in report["rows"])
    return (
        f"{report['diverged']} of {len(report['rows'])} conditions diverge: {tokens} of {total} requests have other "
        f"tokens or texts, {logprobs} others have other log-probabilities{more}"
    )
