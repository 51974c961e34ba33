"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from compiler.held_out import read_prompts
from compiler.recipe import source_recipe
from plans.console import progress_bar
from plans.errors import RequestError
from runtime import Generation, Runtime


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every mode on every prompt `reps` times, modes alternating, after one warm-up of each."""
    started = perf_counter()
    runtime = Runtime.load(options.plan, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    drafters = options.drafters.split(",") if options.drafters else [d.name for d in runtime.manifest.drafters]
    modes = ["none", *(d for d in drafters if d != "none")]
    prompts = choose_prompts(options.plan, options.prompts)[: options.count]

    def run(prompt: str, mode: str) -> Generation:
        return runtime.generate(
            prompt, drafter=mode, max_new_tokens=options.new, temperature=options.temperature, ignore_eos=True
        )

    for mode in modes:
        run(prompts[0], mode)
    runs: dict[str, list[list[Generation]]] = {mode: [[] for _ in prompts] for mode in modes}
    total = options.reps * len(prompts)
    with progress_bar("measuring") as progress:
        for done in range(total):
            repetition, index = divmod(done, len(prompts))
            progress(done, total, f"run {repetition + 1}, prompt {index + 1}")
            for mode in modes:
                runs[mode][index].append(run(prompts[index], mode))
    plain = runs["none"]
    return {
        "plan": str(options.plan),
        "identity": runtime.manifest.identity,
        "target": runtime.target,
        "load_ms": load_ms,
        "prompts": len(prompts),
        "new_tokens": options.new,
        "reps": options.reps,
        "temperature": options.temperature,
        "modes": {mode: _summary(runs[mode], plain) for mode in modes},
    }


def _summary(runs: list[list[Generation]], plain: list[list[Generation]]) -> dict[str, Any]:
    """Medians over all runs; the speedup is the median over pairs of the same prompt and repetition."""
    flat = [g for prompt in runs for g in prompt]
    ratios = [
        p.stats.total_ms / g.stats.total_ms
        for ours, theirs in zip(runs, plain, strict=True)
        for g, p in zip(ours, theirs, strict=True)
    ]
    rates = sorted(g.stats.decode_tokens_per_second for g in flat)
    rounds = sum(g.stats.rounds for g in flat)
    drafted = sum(g.stats.drafted for g in flat)
    return {
        "tokens_per_second": median(rates),
        "tokens_per_second_p10": rates[len(rates) // 10],
        "tokens_per_second_p90": rates[len(rates) * 9 // 10],
        "speedup": median(ratios),
        "tokens_per_verify": sum(g.stats.new_tokens for g in flat) / rounds,
        "acceptance_rate": sum(g.stats.accepted for g in flat) / drafted if drafted else 0.0,
        "ttft_ms": median(g.stats.ttft_ms for g in flat),
        "step_ms": median(g.stats.total_ms / (g.stats.rounds + g.stats.prefill_passes) for g in flat),
        "host_share": median(1 - g.stats.engine_ms / g.stats.total_ms for g in flat),
        "same_tokens": all(
            g.token_ids == p.token_ids
            for ours, theirs in zip(runs, plain, strict=True)
            for g, p in zip(ours, theirs, strict=True)
        ),
    }


def choose_prompts(plan: Path, path: Path | None) -> list[str]:
    """Those of `path`, or the held-out prompts of the recipe that the plan was built from."""
    if path is None:
        recipe = source_recipe(plan, option="--prompts FILE")
        if recipe.held_out_path is None:
            raise RequestError(
                'The plan\'s recipe names no held_out prompts; pass --prompts FILE of {"prompt": ...} lines.'
            )
        path = recipe.held_out_path
    return read_prompts(path)


def print_table(report: dict[str, Any], console: Console) -> None:
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, onnxruntime {machine['onnxruntime']}; {report['target']}, "
        f"plan {report['identity'][:12]}, loaded in {report['load_ms']:.0f} ms"
    )
    console.print(
        f"{report['prompts']} held-out prompts x {report['reps']} runs, {report['new_tokens']} new tokens, "
        f"temperature {report['temperature']}; medians, modes alternating"
    )
    table = Table("drafter", box=None, pad_edge=False)
    for column in ("tokens/s", "p10", "p90", "speedup", "tokens/verify", "accepted", "ttft ms", "step ms", "host"):
        table.add_column(column, justify="right")
    table.add_column("same tokens")
    for name, mode in report["modes"].items():
        table.add_row(
            name,
            f"{mode['tokens_per_second']:.0f}",
            f"{mode['tokens_per_second_p10']:.0f}",
            f"{mode['tokens_per_second_p90']:.0f}",
            f"{mode['speedup']:.2f}x",
            f"{mode['tokens_per_verify']:.2f}",
            f"{mode['acceptance_rate']:.0%}",
            f"{mode['ttft_ms']:.1f}",
            f"{mode['step_ms']:.2f}",
            f"{mode['host_share']:.1%}",
            "yes" if mode["same_tokens"] else "NO",
        )
    console.print(table)
