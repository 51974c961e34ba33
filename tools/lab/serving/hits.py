"""The time to the first token of a prompt of which a share is known, against a cold start."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console

from outrider import Generation, PrefixCacheConfig, Runtime
from outrider.tools.identity import identity_columns
from outrider.tools.lab.serving.load import choose_drafters, load_runtime, prompts_of
from outrider.tools.measuring import Column, make_table, measuring, paired_ratios, print_head, run_in_turn, within


def measure_hits(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every drafter and share of the prompt that is known."""
    runtime = load_runtime(options, cache=PrefixCacheConfig(max_cached_tokens=4 * options.length))
    drafters = choose_drafters(runtime, options)
    prompts = prompts_of(runtime, options, options.length)[: options.count]
    cases = [(drafter, share) for drafter in drafters for share in options.shares]
    rows = []
    with measuring([1.0] * len(cases) * 2 * (1 + len(prompts))) as begin:
        for drafter, share in cases:
            found = _hit(runtime, prompts, drafter, share, options.new, begin)
            rows.append({"drafter": drafter, "share": share, **found})
    return {**identity_columns(runtime, options), "prompt_tokens": options.length, "new": options.new, "rows": rows}


def _hit(
    runtime: Runtime, prompts: Sequence[list[int]], drafter: str, share: int, new: int, begin: Callable[[str], None]
) -> dict[str, Any]:
    cache = runtime.prefix_cache
    assert cache is not None
    session = runtime.session()
    own: dict[str, Any] = {"drafter": drafter, "auto_disable": False, "ignore_eos": True}

    def run(start: str, prompt: list[int], _: int) -> tuple[Generation, float, float]:
        """The generation, what the cache takes to look up and keep, and to copy, in milliseconds."""
        session.reset()
        cache.clear()
        if start == "warm":
            known = [*prompt[: len(prompt) * share // 100], 0]  # and leaves there
            session.generate(known, **own, max_new_tokens=2)
            session.reset()
        before = cache.get_stats()
        found = session.generate(prompt, **own, max_new_tokens=new)
        after = cache.get_stats()
        spent = sum(getattr(after, name) - getattr(before, name) for name in ("match_ms", "insert_ms"))
        return found, spent, after.read_ms - before.read_ms

    shown = within(f"{drafter}, {share} % known", begin)
    cold, warm = run_in_turn(["cold", "warm"], prompts, 1, run, begin=shown).values()
    cold_ms, warm_ms = ([found.stats.ttft_ms for found, *_ in runs] for runs in (cold, warm))
    return {
        "reused": median(found.stats.reused_tokens for found, *_ in warm),
        "cold_ms": median(cold_ms),
        "warm_ms": median(warm_ms),
        "ratio": median(paired_ratios(warm_ms, cold_ms)),
        "match_and_insert": median(spent / found.stats.total_ms for found, spent, _ in warm),
        "copy_ms": median(copied for *_, copied in warm),
        "same_tokens": all(one[0].token_ids == other[0].token_ids for one, other in zip(cold, warm, strict=True)),
    }


def print_hits(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    console.print(f"prompts of {report['prompt_tokens']} tokens, {report['new']} new ones; medians")
    console.print(make_table(_COLUMNS, report["rows"]))


_COLUMNS = (
    Column("drafter", "drafter", text=True),
    Column("known", "share", "", " %"),
    Column("reused", "reused", ".0f"),
    Column("cold ms", "cold_ms", ".1f"),
    Column("warm ms", "warm_ms", ".1f"),
    Column("warm/cold", "ratio", ".3f", "x"),
    Column("match+insert", "match_and_insert", ".2%"),
    Column("copy ms", "copy_ms", ".2f"),
    Column("same", "same_tokens"),
)
