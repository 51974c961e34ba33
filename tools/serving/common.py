"""What the measurements of serving share."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from plans.errors import RequestError
from runtime import PrefixCacheConfig, Runtime, SchedulerConfig
from tools.bench.prompts import choose_prompts, cut_prompts


def load_runtime(
    options: argparse.Namespace,
    mode: str | None = None,
    cache: PrefixCacheConfig | None = None,
    *,
    overlap: bool = True,
) -> Runtime:
    scheduler = SchedulerConfig(mode=mode, overlap=overlap)  # type: ignore[arg-type]
    return Runtime.load(options.plan, threads=options.threads, prefix_cache=cache, scheduler=scheduler)


def choose_drafters(runtime: Runtime, options: argparse.Namespace) -> list[str]:
    known = ["none", *(drafter.name for drafter in runtime.manifest.drafters)]
    asked = known if options.drafters is None else options.drafters.split(",")
    if wrong := [name for name in asked if name not in known]:
        raise RequestError(f"--drafters names {wrong[0]!r}; the plan has {', '.join(known)}.")
    return asked


def prompts_of(runtime: Runtime, options: argparse.Namespace, length: int) -> list[list[int]]:
    held_out = [runtime.tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    return cut_prompts(held_out, length, runtime.manifest.target.context - options.new)


def print_head(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{report['device']}, {machine['cores']} cores, {report['threads']} threads; {report['target']} "
        f"({report['target_version']}), {report['dtype']}; commit {report['git_sha']}, plan {report['identity'][:12]}"
    )


def make_table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in ("drafter", "mode", "what") else "right", no_wrap=True)
    return table
