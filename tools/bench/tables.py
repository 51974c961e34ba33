"""Output of `latency`, `sweep` and `suite`: tables on a terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.tools.bench.columns import Row
from outrider.tools.bench.questions import OVERALL
from outrider.tools.bench.shapes import PLAIN
from outrider.tools.markdown import markdown_table
from outrider.tools.measuring import Column, figure, make_table


def label(row: Row) -> str:
    """The drafter, and by how much it was forced."""
    forced = row["synthetic_accept"]
    return row["drafter"] if forced is None else f"{row['drafter']} synthetic:{forced}"


def shape(row: Row) -> str:
    """The tree as `--tree` has it, else the most nodes of a draft of n-grams; empty for plain decoding."""
    if row["drafter"] == PLAIN:
        return ""
    after = "" if row["otherwise"] is None else f" or {row['otherwise']}"
    return (row["tree"] or f"{row['depth']} nodes") + after


def same(row: Row) -> str:
    if row["same_tokens"] is None:
        return "n/a"
    return "yes" if row["same_tokens"] else f"{row['same_runs']} of {row['runs']}"


def title(report: dict[str, Any]) -> tuple[str, str]:
    """Machine and settings that all rows share."""
    machine, row = report["machine"], report["rows"][0]
    build = "" if row["build_seconds"] is None else f", built in {row['build_seconds']:.0f} s"
    memory = "" if row["peak_rss_bytes"] is None else f", at most {row['peak_rss_bytes'] / 1e6:.0f} MB of memory"
    threads = "" if row["threads"] is None else f", {row['threads']} threads"
    return (
        f"{row['device']}, {machine['cores']} cores{threads}; {row['backend']} "
        f"({row['backend_version']}), weights {row['weights']}, KV {row['dtype']}; commit {row['git_sha']}, "
        f"plan {row['identity'][:12]} "
        f"({row['plan_bytes'] / 1e6:.1f} MB{build}, loaded in {row['load_ms']:.0f} ms{memory})",
        f"{_measured(report)}, sampling {row['sampling']}"
        f"{'' if row['form'] is None else ', form ' + row['form']}; medians, modes alternating",
    )


def _measured(report: dict[str, Any]) -> str:
    row = report["rows"][0]
    if "suite" not in report:
        return f"{row['prompts']} prompts x {row['reps']} runs, {row['new_tokens']} new tokens"
    about = report["suite"]
    return (
        f"{about['questions']} questions of {', '.join(about['questions_by_category'])}: {about['turns']} turns, "
        f"{'with' if about['chat_template'] else 'without'} a chat template, x {row['reps']} runs, at most "
        f"{about['most_new_tokens']} new tokens"
    )


def _drafting(form: Callable[[Row], str]) -> Callable[[Row], str]:
    """A cell that is empty for plain decoding."""
    return lambda row: form(row) if row["drafter"] != PLAIN else ""


def _shares(*keys: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = [ms for ms in map(row.get, keys) if ms is not None]
        return "/".join(f"{ms:.{2 if ms < 10 else 1 if ms < 100 else 0}f}" for ms in found) or "-"

    return cell


_DRAFTER, _TREE = Column("drafter", label, text=True), Column("tree", shape, text=True)
_RATE, _SPEEDUP = Column("tokens /s", "tokens_per_second", ".0f"), Column("speedup", "speedup", ".2f", "x")
_PER_VERIFY = Column("tokens /verify", "tokens_per_verify", ".2f")
_ACCEPTED = Column("accepted", _drafting(lambda row: figure(row["acceptance_rate"], ".0%")))
MAIN = (
    _DRAFTER,
    _TREE,
    Column("prompt", "prompt_tokens", "g"),
    _RATE,
    _SPEEDUP,
    Column("p10-p90", lambda row: f"{row['speedup_p10']:.2f}-{row['speedup_p90']:.2f}"),
    Column("decode", "decode_speedup", ".2f", "x"),
    _PER_VERIFY,
    _ACCEPTED,
    Column("plain", _drafting(lambda row: f"{row['plain_rounds'] / row['rounds']:.0%}")),
    Column("ttft ms p50/p99", _shares("ttft_ms", "ttft_ms_p99")),
    Column("gap ms p50/p99", _shares("itl_ms_p50", "itl_ms_p99")),
    Column("same", same),
)
_NARROW = ("drafter", "tree", "tokens /s", "speedup", "tokens /verify", "ttft ms p50/p99", "gap ms p50/p99", "same")
"""Those that a terminal of 80 columns has room for."""
_CATEGORIES = (
    Column("category", "category", text=True), _DRAFTER, _TREE, Column("turns", "prompts"), _RATE, _SPEEDUP,
    _PER_VERIFY, _ACCEPTED,
)  # fmt: skip
_ENOUGH = 100  # samples, of which one is beyond a p99
_BUSY = 0.1  # share of the processor that other programs take, from which on times are not to be trusted


def category_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each drafter in every category, and overall after them; none where all is of one category."""
    categories = rows[0]["by_task"]
    if len(categories) < 2:
        return []
    found = [row | row["by_task"][category] | {"category": category} for category in categories for row in rows]
    return found + [row | {"category": OVERALL} for row in rows]


def to_markdown(report: dict[str, Any]) -> str:
    """The main figures, those of a suite by category too, and what they were measured on."""
    lines = ["; ".join(title(report)), "", *_markdown(MAIN, report["rows"])]
    if "suite" in report and (categories := category_rows(report["rows"])):
        lines += ["", *_markdown(_CATEGORIES, categories)]
    return "\n".join(lines)


def _markdown(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    heads = [column.head.replace(" /", "/") for column in columns]
    return markdown_table(heads, ([column.cell(row) for column in columns] for row in rows))


def print_table(report: dict[str, Any], console: Console, stages: bool = False) -> None:
    """The main figures, and with `stages` where a round's time goes."""
    rows = report["rows"]
    for line in title(report):
        console.print(line)
    several = len({row["prompt_tokens"] for row in rows}) > 1
    chosen = [column for column in MAIN if column.head in _NARROW or (several and column.head == "prompt")]
    console.print(make_table(chosen, rows, narrow=True))
    for line in _notes(report):
        console.print(line)
    for row in rows:
        if row["first_divergence"] is not None:
            console.print(_divergence(row))
    if "suite" in report and (categories := category_rows(rows)):
        console.print("\nby category")
        console.print(make_table(_CATEGORIES, categories, narrow=True))
    elif len(rows[0]["by_task"]) > 1:
        console.print("\nspeedup (tokens per verify), by task")
        console.print(_task_table(rows))
    if stages:
        console.print("\nmilliseconds a round, by stage (without the prompt's rounds)")
        console.print(_stage_table(rows))


def _notes(report: dict[str, Any]) -> list[str]:
    """What the times are, and how far to trust them."""
    samples = report["rows"][0]["samples"]
    first, gaps = len(samples["ttft_ms"]), sum(map(len, samples["itl_ms"]))
    few = " and ".join(
        f"{name} of {count}" for name, count in (("first tokens", first), ("gaps", gaps)) if count < _ENOUGH
    )
    lines = ["ttft: until the first token; gap: between two pieces of text, one token or several"]
    if few:
        lines.append(f"a p99 takes {_ENOUGH} samples, and there are {few}: there it is the longest")
    if (others := report.get("other_programs") or 0) > _BUSY:
        lines.append(
            f"warning: other programs took {others:.0%} of the processor meanwhile; times are too long, and only "
            "ratios mean anything: stop them, and measure again"
        )
    return lines


def _divergence(row: Row) -> str:
    """The first of a row. All numbers count from 0."""
    plain = "its first repetition" if row["drafter"] == PLAIN else "plain decoding"
    return (
        f"{' '.join(filter(None, (label(row), shape(row))))}: parts from {plain} at generated token "
        f"{row['first_divergence']} of prompt {row['divergence_prompt']} ({row['divergence_prompt_tokens']} tokens), "
        f"counted from 0, where that was ahead by {row['divergence_margin']:.1e} logits"
    )


def _stage_table(rows: Sequence[Row]) -> Table:
    """A line for each stage, a column for each row: there are more stages than a terminal has room for side by side."""
    several = len({row["prompt_tokens"] for row in rows}) > 1
    heads = [" ".join(filter(None, (label(row), shape(row), f"{row['prompt_tokens']:g}" * several))) for row in rows]
    lines = {
        "round": [figure(row["round_ms"], ".3f") for row in rows],
        "host gap": [figure(row["host_gap_ms"], ".3f") for row in rows],
    }
    for stage in dict.fromkeys(name for row in rows for name in row["stages"]):
        lines[stage] = [f"{row['stages'][stage]:.3f}" if stage in row["stages"] else "" for row in rows]
    columns = [Column(head, f"row {place}") for place, head in enumerate(heads)]
    named = [{"stage": name} | {f"row {p}": cell for p, cell in enumerate(cells)} for name, cells in lines.items()]
    return make_table([Column("stage", "stage", text=True), *columns], named, narrow=True)


def _task_table(rows: Sequence[Row]) -> Table:
    """Speedup and tokens per verify: a row for each drafter, a column for each task."""

    def cell(task: str) -> Callable[[Row], str]:
        return lambda row: "{speedup:.2f}x ({tokens_per_verify:.2f})".format_map(row["by_task"][task])

    tasks = rows[0]["by_task"].items()
    columns = [Column(f"{task} ({found['prompt_tokens']:.0f} tokens)", cell(task)) for task, found in tasks]
    return make_table([_DRAFTER, _TREE, *columns], rows, narrow=True)
