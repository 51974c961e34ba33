"""The table of divergences, for a reader."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print a report of `measure` or `against`."""
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores; commit {report['git_sha']}; {report['about']}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("what happens around", no_wrap=True)
    table.add_column("condition", overflow="fold")
    witnessed = any(row.get("witness") for row in report["rows"])
    heads = ["requests", "other tokens", "other logprobs", *(["seen"] if witnessed else [])]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    last = None
    for row in report["rows"]:
        logprobs = "-" if row.get("without_logprobs") else str(row["logprobs_diverged"])
        cells = [str(row["requests"]), str(row["diverged"]), logprobs]
        table.add_row(
            "" if row["group"] == last else row["group"], row["condition"], *cells,
            *([_seen(row["witness"])] if witnessed else []),
        )  # fmt: skip
        last = row["group"]
    console.print(table)
    for row in report["rows"]:
        for name, kind in (("first", "diverged"), ("first_of_logprobs", "logprobs_diverged")):
            if row[name] is not None:
                console.print(
                    f"{row['group']}, {row['condition']}: {row[kind]} of {row['requests']}, first {row[name]['text']}",
                    soft_wrap=True, markup=False,
                )  # fmt: skip
    for each in report["left_out"]:
        console.print(f"left out: {each['what']}: {each['reason']}", soft_wrap=True, markup=False)
    console.print(_verdict(report), soft_wrap=True)


def _seen(witness: dict[str, int] | None) -> str:
    """What shows that a condition was what it says."""
    if witness is None:
        return "-"
    each = witness["tokens"] / max(1, witness["passes"])
    found = [f"{each:.1f} a pass"]
    found += [f"{witness[name]} {name}" for name in ("reused", "resumed") if witness[name]]
    return ", ".join(found)


def _verdict(report: dict[str, Any]) -> str:
    total = sum(row["requests"] for row in report["rows"])
    if not report["diverged"]:
        return f"no divergence in {len(report['rows'])} conditions, {total} requests"
    tokens = sum(row["diverged"] for row in report["rows"])
    logprobs = sum(row["logprobs_diverged"] for row in report["rows"])
    return (
        f"{report['diverged']} of {len(report['rows'])} conditions diverge: {tokens} of {total} requests have other "
        f"tokens or texts, {logprobs} more other log-probabilities"
    )
