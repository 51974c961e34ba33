"""What `latency` prints: tables on a terminal, Markdown, and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench.tasks import task_table

_PLAIN = "none"
_IDENTITY = (
    "git_sha", "identity", "target", "target_version", "dtype", "threads", "temperature", "top_k", "top_p", "seed",
    "new_tokens", "reps", "load_ms", "plan_bytes", "peak_rss_bytes",
)  # fmt: skip


def flat_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row with what it was measured on and with: no value is a list or an object but as text."""
    machine = {f"machine_{key}": value for key, value in report["machine"].items()}
    shared = {key: report[key] for key in _IDENTITY} | machine
    rows = []
    for row in report["rows"]:
        flat = {key: value for key, value in row.items() if key not in ("stages", "acceptance_by_depth", "by_task")}
        flat |= {f"stage_ms_{name}": ms for name, ms in row["stages"].items()}
        flat |= {f"{key}_{task}": v for task, figures in row["by_task"].items() for key, v in figures.items()}
        flat["acceptance_by_depth"] = " ".join(f"{share:.4f}" for share in row["acceptance_by_depth"])
        rows.append(flat | shared)
    return rows


def to_csv(report: dict[str, Any]) -> str:
    """A line a row, all columns; empty where a row has no such figure."""
    rows = flat_rows(report)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(report: dict[str, Any]) -> str:
    """The figures that are read first, and what they were measured on."""
    machine = report["machine"]
    columns = (
        "drafter",
        "tokens/s",
        "speedup",
        "p10 to p90",
        "tokens/verify",
        "accepted",
        "ttft ms",
        "tpot ms p50/p90/p99",
        "same",
    )
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; {report['target']} ({report['target_version']}), plan "
        f"{report['identity'][:12]}, commit {report['git_sha']}; {report['prompts']} prompts x {report['reps']} runs, "
        f"{report['new_tokens']} new tokens, temperature {report['temperature']}",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row in report["rows"]:
        cells = (
            row["drafter"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['speedup_p10']:.2f} to {row['speedup_p90']:.2f}",
            f"{row['tokens_per_verify']:.2f}",
            f"{row['acceptance_rate']:.0%}" if row["drafted"] else "",
            f"{row['ttft_ms']:.1f}",
            "/".join(f"{row[f'tpot_ms_p{share}']:.2f}" for share in (50, 90, 99)),
            "yes" if row["same_tokens"] else f"{row['same_runs']} of {row['runs']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, onnxruntime {machine['onnxruntime']}; {report['target']}, "
        f"plan {report['identity'][:12]}, loaded in {report['load_ms']:.0f} ms"
    )
    console.print(
        f"{report['prompts']} held-out prompts x {report['reps']} runs, {report['new_tokens']} new tokens, "
        f"temperature {report['temperature']}; medians, modes alternating"
    )
    table = Table("drafter", box=None, pad_edge=False)
    columns = (
        "tokens/s (p10-p90)",
        "speedup (p10-p90)",
        "decode",
        "tokens/verify",
        "accepted",
        "plain",
        "ttft ms",
        "tpot ms p50/p90/p99",
        "round ms",
    )
    for column in (*columns, "host gap", "same"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["drafter"],
            "{tokens_per_second:.0f} ({tokens_per_second_p10:.0f}-{tokens_per_second_p90:.0f})".format_map(row),
            "{speedup:.2f}x ({speedup_p10:.2f}-{speedup_p90:.2f})".format_map(row),
            f"{row['decode_speedup']:.2f}x",
            f"{row['tokens_per_verify']:.2f}",
            f"{row['acceptance_rate']:.0%} of {row['drafted']}" if row["drafted"] else "",
            f"{row['plain_rounds'] / row['rounds']:.0%}" if row["drafter"] != _PLAIN else "",
            f"{row['ttft_ms']:.1f}",
            "/".join(f"{row[f'tpot_ms_p{share}']:.2f}" for share in (50, 90, 99)),
            *(f"{row[key]:.3f}" for key in ("round_ms", "host_gap_ms")),
            "yes" if row["same_tokens"] else f"{row['same_runs']} of {row['runs']}",
        )
    console.print(table)
    if len(report["rows"][0]["by_task"]) > 1:
        console.print("\nspeedup (tokens per verify), by task")
        console.print(task_table(report["rows"]))
    console.print("\nmilliseconds a round, by stage (without the prompt's rounds)")
    console.print(_stage_table(report["rows"]))


def _stage_table(rows: list[dict[str, Any]]) -> Table:
    stages = dict.fromkeys(name for row in rows for name in row["stages"])
    table = Table("drafter", box=None, pad_edge=False)
    for stage in stages:
        table.add_column(stage, justify="right")
    for row in rows:
        table.add_row(row["drafter"], *(f"{row['stages'][s]:.3f}" if s in row["stages"] else "" for s in stages))
    return table
