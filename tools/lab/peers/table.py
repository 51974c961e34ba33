"""The table of `python -m outrider.tools.lab.peers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.measuring import Column, figure, make_table


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
    console.print(make_table(_MODES, section["rows"]))
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
        + f"{figure(duel['decode_ratio'], '.2f', 'x')} after the first tokens"
        + (f"; {tasks}" if tasks else "")
    )


def _spread(key: str, form: str, unit: str = "") -> Callable[[dict[str, Any]], str | None]:
    """A median with its 10th and 90th percentile."""

    def cell(row: dict[str, Any]) -> str | None:
        if row[key] is None:
            return None
        return f"{row[key]:{form}}{unit} ({row[f'{key}_p10']:{form}}-{row[f'{key}_p90']:{form}})"

    return cell


_NAMED = (Column("engine", "engine", text=True), Column("mode", "mode", text=True))
_MODES = (
    *_NAMED,
    Column("against ours, plain (p10-p90)", _spread("speedup", ".2f", "x")),
    Column("tokens/s (p10-p90)", _spread("tokens_per_second", ".0f")),
    Column("ttft ms", "ttft_ms", ".1f"),
    Column("e2e ms", "e2e_ms", ".0f"),
    Column("same runs (tokens)", lambda row: f"{row['same_runs']} of {row['runs']} ({row['agreement']:.0%})"),
)


def _matrix(ratios: list[dict[str, Any]]) -> Table:
    """A row for each of their modes, a column for each of ours."""
    show, rows = _spread("ratio", ".2f", "x"), dict[tuple[str, str], dict[str, Any]]()
    for ratio in ratios:
        row = rows.setdefault((ratio["engine"], ratio["mode"]), {key: ratio[key] for key in ("engine", "mode")})
        row[f"our {ratio['ours']}"] = show(ratio)
    ours = dict.fromkeys(ratio["ours"] for ratio in ratios)
    return make_table([*_NAMED, *(Column(name, f"our {name}") for name in ours)], rows.values())
