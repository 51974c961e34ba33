"""Requests served at once against the same ones one after another, and how long who decodes waits for a pass."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.runtime.branch_request import MODES
from outrider.tools.bench.prompts import choose_prompts, cut_prompts
from outrider.tools.identity import identity_columns
from outrider.tools.measuring import (
    Column,
    drafters_named,
    make_table,
    measuring,
    paired_ratios,
    percentile,
    print_head,
    run_in_turn,
    within,
)

ALONE = "one by one"


def load_runtime(
    options: argparse.Namespace, mode: str | None = None, cache: PrefixCacheConfig | None = None
) -> Runtime:
    scheduler = SchedulerConfig(mode=mode)  # type: ignore[arg-type]
    return Runtime.load(options.plan, threads=options.threads, prefix_cache=cache, scheduler=scheduler)


def choose_drafters(runtime: Runtime, options: argparse.Namespace) -> list[str]:
    return drafters_named(options.drafters, (drafter.name for drafter in runtime.manifest.drafters))


def prompts_of(runtime: Runtime, options: argparse.Namespace, length: int) -> list[list[int]]:
    held_out = [runtime.tokenizer.encode(prompt.text) for prompt in choose_prompts(options.plan, options.prompts)]
    return cut_prompts(held_out, length, runtime.manifest.target.context - options.new)


def measure_load(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every drafter, mode and number of requests at once."""
    probe = load_runtime(options)
    geometry, drafters = probe.manifest.target, choose_drafters(probe, options)
    at_once = options.at_once or [geometry.branches]
    modes: dict[str, str | None] = {mode: mode for mode in MODES if mode != "batching" or geometry.rows > 1}
    if geometry.branches == 1:
        modes = {"one at a time": None}
    texts = prompts_of(probe, options, options.length)
    runtimes: dict[str, Runtime] = {name: load_runtime(options, mode) for name, mode in modes.items()}
    cases = [(drafter, count) for drafter in drafters for count in at_once]
    rows = []
    with measuring([1.0] * len(cases) * (1 + len(runtimes)) * (1 + options.reps)) as begin:
        for drafter, count in cases:
            total = count * options.waves
            prompts = [texts[i % len(texts)][: options.length - i % 50] for i in range(total)]
            rows += _loaded(probe, runtimes, prompts, drafter, count, options, begin)
    for runtime in runtimes.values():
        runtime.close()
    return {
        **identity_columns(probe, options),
        "prompt_tokens": options.length,
        "new": options.new,
        "waves": options.waves,
        "rows": rows,
    }


def _loaded(
    probe: Runtime,
    runtimes: dict[str, Runtime],
    prompts: list[list[int]],
    drafter: str,
    count: int,
    options: argparse.Namespace,
    begin: Callable[[str], None],
) -> list[dict[str, Any]]:
    own: dict[str, Any] = {"drafter": drafter, "max_new_tokens": options.new, "ignore_eos": True}

    def run(mode: str, *_: object) -> tuple[float, list[list[int]], list[float]]:
        if mode != ALONE:
            return _together(runtimes[mode], prompts, own, count)
        began = perf_counter()
        expected = [probe.generate(prompt, **own).token_ids for prompt in prompts]
        return perf_counter() - began, expected, []

    shown = within(f"{drafter}, {count} at once", begin)
    found = run_in_turn([ALONE, *runtimes], [None], options.reps, run, begin=shown)
    spent = {mode: [seconds for seconds, *_ in runs] for mode, runs in found.items()}
    rows = []
    for mode, runs in found.items():
        gaps = sorted(gap for *_, between in runs for gap in between)
        rows.append(
            {
                "drafter": drafter,
                "at_once": count,
                "mode": mode,
                "tokens_per_second": options.new * len(prompts) / median(spent[mode]),
                "speedup": median(paired_ratios(spent[ALONE], spent[mode])),
                "gap_p50_ms": percentile(gaps, 50),
                "gap_p99_ms": percentile(gaps, 99),
                "gap_max_ms": max(gaps, default=None),
                "same_tokens": all(run[1] == alone[1] for run, alone in zip(runs, found[ALONE], strict=True)),
            }
        )
    return rows


def _together(
    runtime: Runtime, prompts: list[list[int]], own: dict[str, Any], count: int
) -> tuple[float, list[list[int]], list[float]]:
    """Serve prompts, `count` at once, each followed by the next: seconds, tokens, and milliseconds between spans."""
    found: dict[int, list[int]] = {}
    gaps: list[float] = []
    waiting = iter(enumerate(prompts))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                place, prompt = next(waiting, (-1, []))
            if place < 0:
                return
            tokens, times = list[int](), list[float]()
            for span in runtime.submit(prompt, **own):
                tokens += span.token_ids
                times.append(perf_counter())
            with lock:
                found[place] = tokens
                gaps.extend(1000 * (b - a) for a, b in pairwise(times))

    clients = [threading.Thread(target=client) for _ in range(count)]
    began = perf_counter()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return perf_counter() - began, [found[place] for place in range(len(prompts))], gaps


def print_load(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    console.print(
        f"prompts of {report['prompt_tokens']} tokens and less, {report['new']} new ones, {report['waves']} times as "
        f"many requests as there are at once; medians of {report['reps']} runs"
    )
    console.print(make_table(_COLUMNS, report["rows"]))


_COLUMNS = (
    Column("drafter", "drafter", text=True),
    Column("at once", "at_once"),
    Column("mode", "mode", text=True),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("against one by one", "speedup", ".2f", "x"),
    Column("gap p50", "gap_p50_ms", ".1f"),
    Column("p99", "gap_p99_ms", ".1f"),
    Column("max ms", "gap_max_ms", ".1f"),
    Column("same", "same_tokens"),
)
