"""What the runs of each task's prompts amount to."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tools.bench.rows import Run


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
