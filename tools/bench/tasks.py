"""Summaries of the runs of each task's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from outrider.tools.bench.prompts import Prompts
from outrider.tools.bench.rows import Run, middle, speedup


def by_task(runs: Sequence[Run], plain: Sequence[Run], prompts: Prompts) -> dict[str, dict[str, Any]]:
    """The main figures of a drafter's runs on each task's prompts, as in its whole row."""
    found = {}
    for task in dict.fromkeys(task for task in prompts.tasks if task):
        pairs = [(run, p) for run, p in zip(runs, plain, strict=True) if prompts.tasks[run.prompt] == task]
        stats = [run.stats for run, _ in pairs]
        of = prompts.of(task)
        drafted = sum(s.drafted for s in stats)
        found[task] = {
            "task": task,
            "prompts": len(of.ids),
            "prompts_sha256": of.sha256,
            "prompt_tokens": median(s.prompt_tokens for s in stats),
            "runs": len(pairs),
            "speedup": median(speedup(run, p) for run, p in pairs),
            "tokens_per_verify": sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats),
            "acceptance_rate": sum(s.accepted for s in stats) / drafted if drafted else None,
            "tokens_per_second": middle(run.rate for run, _ in pairs),
            "ttft_ms": median(s.ttft_ms for s in stats),
        }
    return found
