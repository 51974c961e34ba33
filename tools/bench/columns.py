"""The columns of `--csv`: the same, in the same order, for every run of `latency` and `sweep`. README.md says what each
means.

A line is a drafter in one shape after prompts of one length, on all prompts, or, where `task` says so, on those of
that task; lines of a task have the first columns and the main figures. What a line has no figure for is empty.

JSON has the same keys in each row, but for what is nested there: `machine` and `time` stand above the rows, and
`stages`, `acceptance_by_depth`, `ms_along_context` and `by_task` are lists and objects.
"""

from __future__ import annotations

import csv
import io
from typing import Any

Row = dict[str, Any]

_IDENTIFYING = (
    "time", "git_sha", "identity", "backend", "backend_version", "device", "threads", "weights", "dtype", "sampling",
    "form", "reps", "auto_disable", "drafter", "kind", "tree", "nodes", "depth", "acceptance", "otherwise",
    "synthetic_accept", "task", "prompts", "prompts_sha256", "prompt_tokens", "new_tokens", "runs",
)  # fmt: skip
_FIGURES = (
    "speedup", "speedup_p10", "speedup_p90", "decode_speedup", "decode_speedup_p10", "decode_speedup_p90",
    "tokens_per_verify", "acceptance_rate", "acceptance_by_depth", "tokens_per_second", "tokens_per_second_p10",
    "tokens_per_second_p90", "baseline_tokens_per_second", "drafted", "evaluated", "accepted", "rounds",
    "plain_rounds", "ttft_ms", "ttft_ms_p10", "ttft_ms_p90", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p90", "itl_ms_p99",
    "tpot_ms_p50", "tpot_ms_p90", "tpot_ms_p99", "e2e_ms", "e2e_ms_p10", "e2e_ms_p90", "round_ms", "engine_ms",
    "host_gap_ms", "stages", "ms_along_context", "same_tokens", "same_runs", "first_divergence", "divergence_margin",
    "divergence_prompt", "divergence_prompt_tokens", "build_seconds", "build_peak_rss_bytes", "plan_bytes", "load_ms",
    "peak_rss_bytes", "machine_processor", "machine_cores", "machine_python", "machine_onnxruntime",
)  # fmt: skip
COLUMNS = (*_IDENTIFYING, *_FIGURES)


def flat_rows(report: dict[str, Any]) -> list[Row]:
    """A line a row, and one for each of its tasks after it: all columns, no value a list or an object but as text."""
    common = {"time": report["time"]} | {f"machine_{key}": value for key, value in report["machine"].items()}
    lines = []
    for row in report["rows"]:
        lines.append(row | common | _as_text(row))
        if row["task"] is None:  # else the row itself is that task's
            shared = {key: row[key] for key in _IDENTIFYING if key in row}
            lines += [shared | common | figures for figures in row["by_task"].values()]
    return [{column: line.get(column) for column in COLUMNS} for line in lines]


def to_csv(report: dict[str, Any]) -> str:
    """A header and the lines of `flat_rows`; empty where there is no such figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat_rows(report))
    return text.getvalue()


def _as_text(row: Row) -> Row:
    return {
        "acceptance_by_depth": " ".join(f"{share:.4f}" for share in row["acceptance_by_depth"]),
        "stages": " ".join(f"{name}:{ms:.4f}" for name, ms in row["stages"].items()),
        "ms_along_context": " ".join(f"{at['tokens']:g}:{at['ms']:.4f}" for at in row["ms_along_context"]),
    }
