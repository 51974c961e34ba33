"""The columns of `--csv`: the same, in the same order, for every run of `latency` and `sweep`.

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

_IDENTIFYING = {
    "time": "when the run began, ISO 8601",
    "git_sha": "commit of the checkout that measured, -dirty where its files are others",
    "identity": "of the measured plan",
    "backend": "what runs the engines",
    "backend_version": "what built its engines, or runs them here",
    "device": "the processor, or the GPU",
    "threads": "that the target's engine computes with on the CPU, also where the backend chose; empty on a GPU",
    "weights": "of the target's matrices: the recipe's type and method, or that they are the checkpoint's integers",
    "dtype": "of keys and values",
    "sampling": "as --sampling takes it",
    "form": "that the texts keep to: its kind, and the beginning of its SHA-256; they end where it does",
    "reps": "runs of each prompt",
    "auto_disable": "whether a drafter is disabled while it does not pay, and of a draft no more is verified than is "
    "worth its price, where the plan has prices",
    "drafter": "its name in the user's plan; none is plain decoding",
    "kind": "of drafter",
    "tree": "as --tree takes it; empty for drafts that are no trees",
    "nodes": "that the target verifies at most, the tip included",
    "depth": "tokens of the longest path after the tip",
    "acceptance": "coupled or rejection, as in a recipe",
    "otherwise": "the drafter that drafts where these n-grams foresee too little; nodes and depth are of their own",
    "synthetic_accept": "tokens of a draft that were accepted by force",
    "task": "of the prompts; empty where they are not all of one",
    "prompts": "how many",
    "prompts_sha256": "of their token ids, as a JSON list of lists without spaces",
    "prompt_tokens": "of a prompt, median",
    "new_tokens": "that a run generated, median",
    "runs": "repetitions of all prompts",
}
_FIGURES = {
    "speedup": "plain decoding's time for a whole generation, prompt included, over this one's, both by their tokens "
    "(as many, where they are promised to be the same); median of pairs of the same prompt and repetition, with the "
    "10th and 90th percentile: above 1 is faster",
    "speedup_p10": "",
    "speedup_p90": "",
    "decode_speedup": "the same after the tokens that came first",
    "decode_speedup_p10": "",
    "decode_speedup_p90": "",
    "tokens_per_verify": "committed tokens / target passes, the extra token included",
    "acceptance_rate": "accepted / evaluated",
    "acceptance_by_depth": "share of the rounds with a draft that accepted a token at depth 1, 2, ...",
    "tokens_per_second": "after the tokens that came first, median of runs",
    "tokens_per_second_p10": "",
    "tokens_per_second_p90": "",
    "baseline_tokens_per_second": "plain decoding's",
    "drafted": "tokens that drafters handed to the target, all runs: of a tree its nodes after the tip, after the "
    "best were chosen; what a drafter grew and left out is counted nowhere",
    "evaluated": "drafted tokens that the target verified: all of them, or those worth their price",
    "accepted": "of those, accepted",
    "rounds": "target passes that committed tokens, all runs",
    "plain_rounds": "rounds that did not draft because it did not pay. What the session learns of that it keeps from "
    "prompt to prompt and over repetitions, as for a user who stays with one session",
    "ttft_ms": "milliseconds from the first work on the prompt to the first tokens",
    "ttft_ms_p10": "",
    "ttft_ms_p90": "",
    "ttft_ms_p99": "",
    "itl_ms_p50": "milliseconds between two pieces of text, as a user waits for them: of all rounds after the first",
    "itl_ms_p90": "",
    "itl_ms_p99": "",
    "tpot_ms_p50": "milliseconds of a token after the first ones, a round's shared by its tokens: of all tokens",
    "tpot_ms_p90": "",
    "tpot_ms_p99": "",
    "e2e_ms": "milliseconds of a whole generation",
    "e2e_ms_p10": "",
    "e2e_ms_p90": "",
    "round_ms": "milliseconds of a round after the first two, by wall clock",
    "engine_ms": "of that, inside engines",
    "host_gap_ms": "the rest",
    "stages": "NAME:milliseconds of such a round by stage",
    "ms_along_context": "TOKENS:milliseconds of a token, median, by how many stand before it",
    "same_tokens": "whether all runs gave the tokens that plain decoding gave first after their prompt; empty where "
    "that is not promised: of synthetic rows, and of drafters by rejection at a temperature",
    "same_runs": "how many runs did",
    "first_divergence": "index from 0 of the first generated token that differs, of the first prompt with one",
    "divergence_margin": "logits by which plain decoding chose its own there: 1e-4 and less is rounding",
    "divergence_prompt": "that prompt, from 0",
    "divergence_prompt_tokens": "its length",
    "build_seconds": "what the build of the measured plan took, on its machine",
    "build_peak_rss_bytes": "most memory of the process that built",
    "plan_bytes": "of the plan's files",
    "load_ms": "milliseconds to load it",
    "peak_rss_bytes": "most memory that the measuring process has held, everything in it: the same in all rows",
}
_MACHINE = {
    "machine_processor": "its name",
    "machine_cores": "that this process may use",
    "machine_python": "version",
    "machine_onnxruntime": "version",
}
COLUMNS = _IDENTIFYING | _FIGURES | _MACHINE
"""Name and meaning. A `_p10`, `_p90` or `_p99` is a percentile of the figure before it."""


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
