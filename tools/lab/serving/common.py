"""Shared parts of the measurements of serving."""

from __future__ import annotations

import argparse

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.measuring import drafters_named


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
    return drafters_named(options.drafters, (drafter.name for drafter in runtime.manifest.drafters))


def prompts_of(runtime: Runtime, options: argparse.Namespace, length: int) -> list[list[int]]:
    held_out = [runtime.tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    return cut_prompts(held_out, length, runtime.manifest.target.context - options.new)
