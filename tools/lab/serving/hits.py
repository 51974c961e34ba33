"""The time to the first token of a prompt of which a share is known, against a cold start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console

from outrider import Generation, PrefixCacheConfig, Runtime
from outrider.commands.console import progress_bar
from outrider.tools.bench.identity import identity_columns
from outrider.tools.lab.serving.common import choose_drafters, load_runtime, prompts_of
from outrider.tools.output import make_table, print_head


def measure_hits(options: argparse.Namespace) -> dict[str, Any]:
    """A row for every drafter and share of the prompt that is known."""
    runtime = load_runtime(options, cache=PrefixCacheConfig(max_cached_tokens=4 * options.length))
    drafters = choose_drafters(runtime, options)
    prompts = prompts_of(runtime, options, options.length)[: options.count]
    rows = []
    with progress_bar("measuring") as progress:
        cases = [(drafter, share) for drafter in drafters for share in options.shares]
        for place, (drafter, share) in enumerate(cases):
            progress(place, len(cases), f"{drafter}, {share} % known")
            rows.append({"drafter": drafter, "share": share, **_hit(runtime, prompts, drafter, share, options.new)})
    return {**identity_columns(runtime, options), "prompt_tokens": options.length, "new": options.new, "rows": rows}


def _hit(runtime: Runtime, prompts: Sequence[list[int]], drafter: str, share: int, new: int) -> dict[str, Any]:
    cache = runtime.prefix_cache
    assert cache is not None
    session = runtime.session()
    own: dict[str, Any] = {"drafter": drafter, "auto_disable": False, "ignore_eos": True}
    cold_ms, warm_ms, reused, ours, same = [], [], [], [], True
    for place, prompt in enumerate([prompts[0], *prompts]):
        known = [*prompt[: len(prompt) * share // 100], 0]  # and leaves there
        found: list[Generation] = []
        for beginning in ([], known):
            session.reset()
            cache.clear()
            if beginning:
                session.generate(beginning, **own, max_new_tokens=2)
            session.reset()
            before = cache.get_stats()
            found.append(session.generate(prompt, **own, max_new_tokens=new))
            after = cache.get_stats()
        same = same and found[0].token_ids == found[1].token_ids
        if not place:  # the first warms up
            continue
        cold_ms.append(found[0].stats.ttft_ms)
        warm_ms.append(found[1].stats.ttft_ms)
        reused.append(found[1].stats.reused_tokens)
        spent = sum(getattr(after, name) - getattr(before, name) for name in ("match_ms", "insert_ms"))
        ours.append((spent / found[1].stats.total_ms, (after.read_ms - before.read_ms)))
    return {
        "reused": median(reused),
        "cold_ms": median(cold_ms),
        "warm_ms": median(warm_ms),
        "ratio": median(warm / cold for warm, cold in zip(warm_ms, cold_ms, strict=True)),
        "match_and_insert": median(each[0] for each in ours),
        "copy_ms": median(each[1] for each in ours),
        "same_tokens": same,
    }


def print_hits(report: dict[str, Any], console: Console) -> None:
    print_head(report, console)
    console.print(f"prompts of {report['prompt_tokens']} tokens, {report['new']} new ones; medians")
    table = make_table(
        "drafter", "known", "reused", "cold ms", "warm ms", "warm/cold", "match+insert", "copy ms", "same"
    )
    for row in report["rows"]:
        table.add_row(
            row["drafter"],
            f"{row['share']} %",
            f"{row['reused']:.0f}",
            f"{row['cold_ms']:.1f}",
            f"{row['warm_ms']:.1f}",
            f"{row['ratio']:.3f}x",
            f"{row['match_and_insert']:.2%}",
            f"{row['copy_ms']:.2f}",
            "yes" if row["same_tokens"] else "no",
        )
    console.print(table)
