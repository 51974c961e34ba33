"""The table of `python -m tools.peers`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from tools.output import figure


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    versions = ", ".join(f"{engine} ({version})" for engine, version in report["versions"].items())
    console.print(f"{machine['processor']}, {machine['cores']} cores, {report['threads']} threads each: {versions}")
    console.print(
        f"{report['checkpoint']}, fp32, greedy; {report['prompts']} prompts ({report['prompt_tokens']:.0f} tokens) x "
        f"{report['reps']} runs, {report['new_tokens']} new tokens; medians, processes alternating, idle ones at most "
        f"{report['idle_share']:.1%} of a core"
    )
    console.print(_modes(report["rows"]))
    for row in report["rows"]:
        plain = "its first repetition" if row is report["rows"][0] else "our plain decoding"
        for found in row["differences"]:
            console.print(
                f"{row['engine']} {row['mode']}: parts from {plain} at generated token {found['index']} of "
                f"prompt {found['prompt']} ({found['prompt_tokens']} tokens), counted from 0, where that was ahead by "
                f"{found['margin']:.1e} logits"
            )
    if report["ratios"]:
        console.print("\nhow many times as fast ours is, whole generations (p10-p90)")
        console.print(_matrix(report["ratios"]))
        console.print()
    for best in report["best"]:
        tasks = ", ".join(f"{task} {ratio:.2f}x" for task, ratio in best["by_task"].items())
        console.print(
            "best against best: {ours} is {best_ratio:.2f}x ({best_ratio_p10:.2f}-{best_ratio_p90:.2f}) as fast as "
            "{engine} {mode}, ".format_map(best)
            + f"{figure(best['decode_ratio'], '.2f', 'x')} behind the first tokens"
            + (f"; {tasks}" if tasks else "")
        )
    for absent in report["missing"]:
        mode = f" {absent['mode']}" if absent["mode"] else ""
        console.print(f"missing: {absent['engine']}{mode}: {absent['reason']}", markup=False)


def _modes(rows: list[dict[str, Any]]) -> Table:
    table = Table("engine", "mode", box=None, pad_edge=False)
    for column in ("against ours, plain (p10-p90)", "tokens/s (p10-p90)", "ttft ms", "e2e ms", "same tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["engine"],
            row["mode"],
            "{speedup:.2f}x ({speedup_p10:.2f}-{speedup_p90:.2f})".format_map(row),
            _rate(row),
            f"{row['ttft_ms']:.1f}",
            f"{row['e2e_ms']:.0f}",
            f"{row['same_runs']} of {row['runs']}",
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
