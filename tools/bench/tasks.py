"""Prompts by task: which are run, and what the runs of each task amount to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from compiler.held_out import Prompt, read_tasks
from compiler.recipe import source_recipe
from plans.errors import RequestError
from tools.bench.rows import Run


def choose_prompts(plan: Path, path: Path | None, task: str | None = None) -> list[Prompt]:
    """Those of `path`, or the held-out prompts of the recipe that the plan was built from; all, or those of `task`.

    One of every task comes first, then a second one of each, so that the first few cover all tasks.
    """
    if path is None:
        recipe = source_recipe(plan, option="--prompts FILE")
        if recipe.held_out_path is None:
            raise RequestError(
                'The plan\'s recipe names no held_out prompts; pass --prompts FILE of {"prompt": ...} lines.'
            )
        path = recipe.held_out_path
    by_task: dict[str | None, list[Prompt]] = {}
    for prompt in read_tasks(path):
        by_task.setdefault(prompt.task, []).append(prompt)
    if task is not None:
        if task not in by_task:
            named = ", ".join(sorted(name for name in by_task if name))
            has = f"has the tasks {named}; pass one of those" if named else "names no tasks; leave it out"
            raise RequestError(f"--task is {task!r}, but {path} {has}.")
        return by_task[task]
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_task.values())) if prompt is not None]


def by_task(runs: Sequence[Run], plain: Sequence[Run], tasks: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    """The main figures of a drafter's runs on each task's prompts, as in its whole row; `tasks` by index of prompt."""
    found = {}
    for task in dict.fromkeys(task for task in tasks if task):
        pairs = [(run, p) for run, p in zip(runs, plain, strict=True) if tasks[run.prompt] == task]
        if not pairs:
            continue
        stats = [run.stats for run, _ in pairs]
        found[task] = {
            "runs": len(pairs),
            "prompt_tokens": median(s.prompt_tokens for s in stats),
            "speedup": median(p.stats.total_ms / run.stats.total_ms for run, p in pairs),
            "tokens_per_verify": sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats),
            "tokens_per_second": median(s.decode_tokens_per_second for s in stats),
            "ttft_ms": median(s.ttft_ms for s in stats),
        }
    return found


def task_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Speedup and tokens per verify: a row for each drafter, a column for each task."""
    tasks = rows[0]["by_task"]
    table = Table("drafter", box=None, pad_edge=False)
    for task, figures in tasks.items():
        table.add_column(f"{task} ({figures['prompt_tokens']:.0f} tokens)", justify="right")
    for row in rows:
        cells = (row["by_task"][task] for task in tasks)
        table.add_row(row["drafter"], *(f"{c['speedup']:.2f}x ({c['tokens_per_verify']:.2f})" for c in cells))
    return table
