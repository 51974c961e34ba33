"""The table of divergences, for a reader."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_FIGURES = ("requests", "diverged", "logprobs_diverged")


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print a report of `measure` or `measure_server`: a row a condition, then the first divergence of each."""
    witnessed = any(row["witness"] for row in report["rows"])
    table = _table("condition", "requests", "diverged", "logprobs", *(["seen"] if witnessed else []))
    last = None
    for row in report["rows"]:
        group = "" if row["group"] == last else row["group"]
        seen = [_seen(row["witness"])] if witnessed else []
        table.add_row(group, row["condition"], *_figures(row), *seen)
        last = row["group"]
    _print(report, table, report["rows"], console)


def print_groups(report: dict[str, Any], console: Console) -> None:
    """Print a row for every group of conditions, then the first divergence of each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(row["group"], []).append(row)
    table = _table("conditions", "requests", "diverged", "logprobs")
    firsts = []
    for group, rows in groups.items():
        whole = {name: sum(row[name] for row in rows) for name in _FIGURES}
        whole["without_logprobs"] = all(row.get("without_logprobs") for row in rows)
        table.add_row(group, str(len(rows)), *_figures(whole))
        firsts += next(([row] for row in rows if row["first"] or row["first_of_logprobs"]), [])
    _print(report, table, firsts, console)


def _table(second: str, *heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("around", no_wrap=True)
    table.add_column(second, overflow="fold")
    for head in heads:
        table.add_column(head, justify="left" if head == "seen" else "right", no_wrap=True)
    return table


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


def _figures(row: dict[str, Any]) -> list[str]:
    """Requests, those with other tokens, and those with other log-probabilities alone, "-" where none are told."""
    logprobs = "-" if row.get("without_logprobs") else str(row["logprobs_diverged"])
    return [str(row["requests"]), str(row["diverged"]), logprobs]


def _seen(witness: dict[str, int] | None) -> str:
    """What shows that a condition was what it says: tokens a pass of the target, and tokens not computed again."""
    if witness is None:
        return "-"
    found = [f"{witness['tokens'] / max(1, witness['passes']):.1f} a pass"] if "passes" in witness else []
    shown = ("reused", "resumed") if "passes" in witness else ("accepted", "reused")
    found += [f"{witness[name]} {name}" for name in shown if witness[name]]
    return ", ".join(found) or "-"


def _verdict(report: dict[str, Any]) -> str:
    failed = report.get("failed_at_first")
    more = f"; of the first answers, {failed} of {report['requests']} were errors" if failed else ""
    return _divergences(report) + more


def _divergences(report: dict[str, Any]) -> str:
    total = sum(row["requests"] for row in report["rows"])
    if not report["diverged"]:
        return f"no divergence in {len(report['rows'])} conditions, {total} requests"
    tokens = sum(row["diverged"] for row in report["rows"])
    logprobs = sum(row["logprobs_diverged"] for row in report["rows"])
    return (
        f"{report['diverged']} of {len(report['rows'])} conditions diverge: {tokens} of {total} requests have other "
        f"tokens or texts, {logprobs} others have other log-probabilities"
    )
