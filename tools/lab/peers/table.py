"""The table of `python -m outrider.tools.lab.peers`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.output import figure


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print a section for each precision."""
    machine = report["machine"]
    for section in report["precisions"]:
        versions = ", ".join(f"{engine} ({version})" for engine, version in section["versions"].items())
        console.print(f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads each: {versions}")
        console.print(
            f"{report['checkpoint']}, {section['precision']}, greedy; {section['prompts']} prompts "
            f"({section['prompt_tokens']:.0f} tokens) x {report['reps']} runs, {report['new_tokens']} new tokens; "
            f"medians, processes alternating, idle ones at most {section['idle_share']:.1%} of a core"
        )
        _print_section(section, console)
        console.print()


def _print_section(section: dict[str, Any], console: Console) -> None:
    console.print(_modes(section["rows"]))
    for row in section["rows"]:
        plain = "its first repetition" if row is section["rows"][0] else "our plain decoding"
        for found in row["differences"]:
            console.print(
                f"{row['engine']} {row['mode']}: parts from {plain} at generated token {found['index']} of "
                f"prompt {found['prompt']} ({found['prompt_tokens']} tokens), counted from 0, where that was ahead by "
                f"{found['margin']:.1e} logits"
            )
    if section["ratios"]:
        console.print("\nhow many times as fast ours is, whole generations (p10-p90)")
        console.print(_matrix(section["ratios"]))
        console.print()
    for what in ("plain", "best"):
        for duel in section[what]:
            _print_duel(what, duel, console)
    for absent in section["missing"]:
        mode = f" {absent['mode']}" if absent["mode"] else ""
        console.print(f"missing: {absent['engine']}{mode}: {absent['reason']}", markup=False)


def _print_duel(what: str, duel: dict[str, Any], console: Console) -> None:
    tasks = ", ".join(f"{task} {ratio:.2f}x" for task, ratio in duel["by_task"].items())
    console.print(
        f"{what} against {what}: "
        + "{ours} is {ratio:.2f}x ({ratio_p10:.2f}-{ratio_p90:.2f}) as fast as {engine} {mode}, ".format_map(duel)
        + f"{figure(duel['decode_ratio'], '.2f', 'x')} behind the first tokens"
        + (f"; {tasks}" if tasks else "")
    )


def _modes(rows: list[dict[str, Any]]) -> Table:
    table = Table("engine", "mode", box=None, pad_edge=False)
    for column in ("against ours, plain (p10-p90)", "tokens/s (p10-p90)", "ttft ms", "e2e ms", "same runs (tokens)"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["engine"],
            row["mode"],
            "{speedup:.2f}x ({speedup_p10:.2f}-{speedup_p90:.2f})".format_map(row),
            _rate(row),
            f"{row['ttft_ms']:.1f}",
            f"{row['e2e_ms']:.0f}",
            f"{row['same_runs']} of {row['runs']} ({row['agreement']:.0%})",
        )
    return table


def _rate(row: dict[str, Any]) -> str:
    if row["tokens_per_second"] is None:
        return "-"
    return "{tokens_per_second:.0f} ({tokens_per_second_p10:.0f}-{tokens_per_second_p90:.0f})".format_map(row)


def _matrix(ratios: list[dict[str, Any]]) -> Table:
    """A row for each of their modes, a column for each of ours."""
    table = Table("engine", "mode", box=None, pad_edge=False)
    cells: dict[tuple[str, str], list[str]] = {}
    for ratio in ratios:
        cell = "{ratio:.2f}x ({ratio_p10:.2f}-{ratio_p90:.2f})".format_map(ratio)
        cells.setdefault((ratio["engine"], ratio["mode"]), []).append(cell)
    for ours in dict.fromkeys(ratio["ours"] for ratio in ratios):
        table.add_column(ours, justify="right")
    for names, row in cells.items():
        table.add_row(*names, *row)
    return table
