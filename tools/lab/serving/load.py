"""Requests served at once against the same ones one after another, and how long who decodes waits for a pass."""

from __future__ import annotations

import argparse
import threading
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console

from outrider import Runtime
from outrider.commands.console import progress_bar
from outrider.runtime.branch_request import MODES
from outrider.tools.bench.identity import identity_columns
from outrider.tools.lab.serving.common import choose_drafters, load_runtime, prompts_of
from outrider.tools.output import figure, make_table, print_head


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
    if options.compare_overlap:  # where the text of a pass is made out before the next one begins
        runtimes |= {f"{name}, text first": load_runtime(options, mode, overlap=False) for name, mode in modes.items()}
    rows = []
    cases = [(drafter, count) for drafter in drafters for count in at_once]
    with progress_bar("measuring") as progress:
        for place, (drafter, count) in enumerate(cases):
            progress(place, len(cases), f"{drafter}, {count} at once")
            total = count * options.waves
            prompts = [texts[i % len(texts)][: options.length - i % 50] for i in range(total)]
            rows += _loaded(probe, runtimes, prompts, drafter, count, options)
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
) -> list[dict[str, Any]]:
    own: dict[str, Any] = {"drafter": drafter, "max_new_tokens": options.new, "ignore_eos": True}
    spent: dict[str, list[float]] = {mode: [] for mode in ("one by one", *runtimes)}
    gaps: dict[str, list[float]] = {mode: [] for mode in runtimes}
    same = dict.fromkeys(runtimes, True)
    for repetition in range(options.reps + 1):
        began = perf_counter()
        expected = [probe.generate(prompt, **own).token_ids for prompt in prompts]
        alone = perf_counter() - began
        if repetition:
            spent["one by one"].append(alone)
        for mode, runtime in runtimes.items():
            took, found, between = _together(runtime, prompts, own, count)
            same[mode] = same[mode] and found == expected
            if repetition:
                spent[mode].append(took)
                gaps[mode] += between
    tokens = options.new * len(prompts)
    rows = []
    for mode in spent:
        between = sorted(gaps.get(mode, []))
        pairs = zip(spent["one by one"], spent[mode], strict=True)
        rows.append(
            {
                "drafter": drafter,
                "at_once": count,
                "mode": mode,
                "tokens_per_second": tokens / median(spent[mode]),
                "speedup": median(alone / own for alone, own in pairs),
                "gap_p50_ms": between[len(between) // 2] if between else None,
                "gap_p99_ms": between[len(between) * 99 // 100] if between else None,
                "gap_max_ms": between[-1] if between else None,
                "same_tokens": same.get(mode, True),
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
    table = make_table(
        "drafter", "at once", "mode", "tokens/s", "against one by one", "gap p50", "p99", "max ms", "same"
    )
    for row in report["rows"]:
        table.add_row(
            row["drafter"],
            str(row["at_once"]),
            row["mode"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            figure(row["gap_p50_ms"], ".1f"),
            figure(row["gap_p99_ms"], ".1f"),
            figure(row["gap_max_ms"], ".1f"),
            "yes" if row["same_tokens"] else "no",
        )
    console.print(table)
