"""Mixed requests from several threads for minutes: memory, failures, and tokens compared with being alone."""

from __future__ import annotations

import argparse
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from rich.console import Console

from outrider import Handle, PrefixCacheConfig
from outrider.commands.console import progress_bar
from outrider.plans.errors import BusyError, OutriderError, RequestError
from outrider.tools.identity import identity_columns
from outrider.tools.lab.serving.common import choose_drafters, load_runtime, prompts_of
from outrider.tools.measuring import Column, make_table, print_head

SECONDS = 60.0  # of a minute


def measure_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Mixed requests for `--minutes`: what came of them, and how memory went."""
    cache = PrefixCacheConfig(max_cached_tokens=16384)
    runtime, alone = load_runtime(options, cache=cache), load_runtime(options)
    drafters = choose_drafters(runtime, options)
    texts = prompts_of(runtime, options, options.length)
    counts = dict.fromkeys(("finished", "cancelled", "deadline", "failed", "compared", "differing"), 0)
    comparing, stopped = threading.Lock(), threading.Event()
    lock, until, began = threading.Lock(), monotonic() + SECONDS * options.minutes, monotonic()
    memory: list[dict[str, float]] = []

    def client(seed: int) -> None:
        draw = random.Random(seed)
        while monotonic() < until and not stopped.is_set():
            text = texts[draw.randrange(len(texts))]
            prompt = [*text[: draw.randrange(1, len(text))], draw.randrange(100)]
            own: dict[str, Any] = {
                "drafter": draw.choice(drafters),
                "max_new_tokens": draw.randrange(1, options.new + 1),
                "temperature": draw.choice([0.0, 0.8]),
                "seed": draw.randrange(1000),
            }
            try:
                handle = runtime.submit(prompt, deadline=draw.choice([None, None, None, 0.2, 30.0]), **own)
            except BusyError:  # an interrupt has closed the runtime
                return
            what = _use(handle, draw.random() < 0.2, draw.randrange(20))
            with lock:
                counts[what] += 1
            if what == "finished" and draw.random() < 0.05:
                with comparing:  # one at a time: sessions of its own would be memory that grows
                    same = handle.result().token_ids == alone.generate(prompt, **own).token_ids
                with lock:
                    counts["compared"] += 1
                    counts["differing"] += not same

    clients = [threading.Thread(target=client, args=(seed,), daemon=True) for seed in range(options.clients)]
    for thread in clients:
        thread.start()
    try:
        with progress_bar("soaking") as progress:
            while any(thread.is_alive() for thread in clients):
                memory.append({"minutes": (monotonic() - began) / 60, "rss_mb": _resident_bytes() / 1e6})
                spent = min(int(monotonic() - began), int(SECONDS * options.minutes))
                with lock:
                    progress(
                        spent,
                        int(SECONDS * options.minutes),
                        f"{sum(counts.values())} requests, {memory[-1]['rss_mb']:.0f} MB",
                    )
                _wait(clients, options.every)
    finally:  # an interrupt too: threads that still compute while Python ends would crash it
        stopped.set()
        runtime.close(drain=False)
        for thread in clients:
            thread.join()
    assert runtime.prefix_cache is not None
    runtime.prefix_cache.check()
    settled = [each["rss_mb"] for each in memory[len(memory) // 4 :]]
    return {
        **identity_columns(runtime, options),
        **counts,
        "minutes": options.minutes,
        "clients": options.clients,
        "memory": memory,
        "rss_growth_mb": settled[-1] - settled[0],
        "references_left": runtime.prefix_cache.in_use,
        "scheduler": runtime.scheduler_stats.to_json(),
        "cache": runtime.prefix_cache.get_stats().to_json(),
    }


def _wait(clients: Sequence[threading.Thread], seconds: float) -> None:
    """For so long, or until all have ended. An interrupted `join` would take a thread that runs for one that ended."""
    until = monotonic() + seconds
    while monotonic() < until and any(thread.is_alive() for thread in clients):
        sleep(min(seconds, 0.1))


def _use(handle: Handle, cancels: bool, spans: int) -> str:
    try:
        for place, _ in enumerate(handle):
            if cancels and place == spans:
                handle.cancel()
        reason = handle.result().finish_reason.value
    except OutriderError:
        return "failed"
    return reason if reason in ("cancelled", "deadline") else "finished"


def _resident_bytes() -> int:
    """Of this process, now."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError as error:
        raise RequestError("soak reads /proc/self/statm, which only Linux has.") from error
    return int(fields[1]) * 4096


def print_soak(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    memory, cache, scheduler = report["memory"], report["cache"], report["scheduler"]
    figures = {
        "minutes, clients": f"{report['minutes']}, {report['clients']}",
        "requests that finished": report["finished"],
        "cancelled, late": f"{report['cancelled']}, {report['deadline']}",
        "failed": report["failed"],
        "compared with being alone, differing": f"{report['compared']}, {report['differing']}",
        "tokens, a second of passes": f"{scheduler['new_tokens']}, {_rate(scheduler):.0f}",
        "longest pass": f"{scheduler['longest_round_ms']:.0f} ms",
        "hits, reused tokens": f"{cache['hit_rate']:.1%}, {cache['reuse_rate']:.1%}",
        "evictions, tokens": f"{cache['eviction_count']}, {cache['tokens_evicted']}",
        "references left": report["references_left"],
        "resident memory, first and last": f"{memory[0]['rss_mb']:.0f}, {memory[-1]['rss_mb']:.0f} MB",
        "growth after the first quarter": f"{report['rss_growth_mb']:.1f} MB",
    }
    rows = ({"what": what, "figure": found} for what, found in figures.items())
    console.print(make_table((Column("what", "what", text=True), Column("figure", "figure")), rows))


def _rate(scheduler: dict[str, Any]) -> float:
    return 1000 * scheduler["new_tokens"] / scheduler["busy_ms"] if scheduler["busy_ms"] else 0.0
