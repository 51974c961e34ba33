"""Plain decoding against drafters: alternating runs on the same prompts, medians and paired ratios."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
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
from plans.manifest import Drafter
from runtime import Generation, Runtime, Session, Stats
from runtime.request import Options

_PLAIN = "none"
_OPENING = 2  # rounds that the stage times leave out: one ends the prompt, in the next a drafter reads it


@dataclass(frozen=True)
class Run:
    """One generation. `wall_ms` and `steady` are of its rounds behind the opening, by the wall clock and by stage."""

    generation: Generation
    wall_ms: float
    steady: Stats

    @property
    def stats(self) -> Stats:
        return self.generation.stats

    @property
    def rounds(self) -> int:
        """Rounds behind the opening."""
        return max(self.stats.rounds - _OPENING, 0)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run every mode on every prompt `reps` times, modes alternating, after one warm-up of each."""
    started = perf_counter()
    runtime = Runtime.load(options.plan, target=options.target, threads=options.threads)
    load_ms = (perf_counter() - started) * 1000
    kinds = {_PLAIN: None} | {d.name: d.kind for d in runtime.manifest.drafters}
    modes = choose_drafters(runtime.manifest.drafters, options.drafters)
    prompts = choose_prompts(options.plan, options.prompts)[: options.count]
    settings = Options(
        max_new_tokens=options.new,
        temperature=options.temperature,
        ignore_eos=True,
        auto_disable=not options.keep_drafting,
    )
    session = runtime.session()
    for mode in modes:
        _run(session, prompts[0], mode, settings)
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    total = options.reps * len(prompts)
    with progress_bar("measuring") as progress:
        for done in range(total):
            repetition, index = divmod(done, len(prompts))
            progress(done, total, f"run {repetition + 1}, prompt {index + 1}")
            for mode in modes:
                runs[mode].append(_run(session, prompts[index], mode, settings))
    return {
        "plan": str(options.plan),
        "identity": runtime.manifest.identity,
        "target": runtime.target,
        "threads": options.threads,
        "load_ms": load_ms,
        "prompts": len(prompts),
        "new_tokens": options.new,
        "reps": options.reps,
        "temperature": options.temperature,
        "auto_disable": not options.keep_drafting,
        "rows": [{"drafter": m, "kind": kinds[m], **_summary(runs[m], runs[_PLAIN])} for m in modes],
    }


def choose_drafters(drafters: Sequence[Drafter], wanted: str | None) -> list[str]:
    """Plain decoding first, then what `wanted` lists by name or by kind; everything without it.

    A name goes before a kind that is spelled alike. Raises `RequestError` for what the plan has not.
    """
    names = [_PLAIN, *(d.name for d in drafters)]
    if wanted is None:
        return names
    chosen = [_PLAIN]
    for word in (part.strip() for part in wanted.split(",")):
        found = [word] if word in names else [d.name for d in drafters if d.kind == word]
        if not found:
            has = ", ".join([*(f"{d.name} ({d.kind})" for d in drafters), _PLAIN])
            raise RequestError(f"--drafters names {word!r}, but the plan has {has}; pass names or kinds of those.")
        chosen += [name for name in found if name not in chosen]
    return chosen


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


def _run(session: Session, prompt: str, drafter: str, settings: Options) -> Run:
    session.reset()
    stream = session.stream(prompt, **(settings | Options(drafter=drafter)))
    for _ in islice(stream, _OPENING):
        pass
    clock = session.stage_clock()
    started = perf_counter()
    generation = stream.result
    wall_ms = (perf_counter() - started) * 1000
    steady = Stats()
    clock.fill(steady)
    return Run(generation, wall_ms, steady)


def _summary(runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    """Medians over all runs; speedups are those of pairs of the same prompt and repetition.

    `speedup` has the prompt in it, `decode_speedup` begins behind the first token.
    """
    stats = [run.stats for run in runs]
    rates = [s.decode_tokens_per_second for s in stats]
    ratios = [p.stats.total_ms / run.stats.total_ms for run, p in zip(runs, plain, strict=True)]
    decoding = [
        run.stats.decode_tokens_per_second / rate
        for run, p in zip(runs, plain, strict=True)
        if (rate := p.stats.decode_tokens_per_second)
    ]
    rounds, drafted, accepted = (sum(getattr(s, key) for s in stats) for key in ("rounds", "drafted", "accepted"))
    same = sum(run.generation.token_ids == p.generation.token_ids for run, p in zip(runs, plain, strict=True))
    steady = [run for run in runs if run.rounds]
    names = dict.fromkeys(name for run in steady for name, spent in run.steady.stage_ms.items() if spent)
    return {
        **_spread("speedup", ratios),
        "decode_speedup": median(decoding) if decoding else 0.0,
        "tokens_per_verify": sum(s.new_tokens for s in stats) / rounds,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        **_spread("tokens_per_second", rates),
        "drafted": drafted,
        "accepted": accepted,
        "rounds": rounds,
        "plain_rounds": sum(s.plain_rounds for s in stats),
        "ttft_ms": median(s.ttft_ms for s in stats),
        "round_ms": _per_round(steady, [run.wall_ms for run in steady]),
        "engine_ms": _per_round(steady, [run.steady.engine_ms for run in steady]),
        "host_gap_ms": _per_round(steady, [run.wall_ms - run.steady.engine_ms for run in steady]),
        "stages": {name: _per_round(steady, [run.steady.stage_ms[name] for run in steady]) for name in names},
        "same_tokens": same == len(runs),
        "same_runs": same,
        "runs": len(runs),
    }


def _spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ranked = sorted(values)
    return {
        name: median(ranked),
        f"{name}_p10": ranked[len(ranked) // 10],
        f"{name}_p90": ranked[len(ranked) * 9 // 10],
    }


def _per_round(runs: list[Run], ms: list[float]) -> float:
    """Median over runs of what a round took; 0 where all were too short to tell."""
    return median(spent / run.rounds for run, spent in zip(runs, ms, strict=True)) if runs else 0.0


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
    columns = (
        "tokens/s (p10-p90)",
        "speedup (p10-p90)",
        "decode",
        "tokens/verify",
        "accepted",
        "plain",
        "ttft ms",
        "round ms",
    )
    for column in (*columns, "host gap", "same"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            row["drafter"],
            "{tokens_per_second:.0f} ({tokens_per_second_p10:.0f}-{tokens_per_second_p90:.0f})".format_map(row),
            "{speedup:.2f}x ({speedup_p10:.2f}-{speedup_p90:.2f})".format_map(row),
            f"{row['decode_speedup']:.2f}x",
            f"{row['tokens_per_verify']:.2f}",
            f"{row['acceptance_rate']:.0%} of {row['drafted']}" if row["drafted"] else "",
            f"{row['plain_rounds'] / row['rounds']:.0%}" if row["drafter"] != _PLAIN else "",
            f"{row['ttft_ms']:.1f}",
            *(f"{row[key]:.3f}" for key in ("round_ms", "host_gap_ms")),
            "yes" if row["same_tokens"] else f"{row['same_runs']} of {row['runs']}",
        )
    console.print(table)
    console.print("\nmilliseconds a round, by stage (without the prompt's rounds)")
    console.print(_stage_table(report["rows"]))


def _stage_table(rows: list[dict[str, Any]]) -> Table:
    stages = dict.fromkeys(name for row in rows for name in row["stages"])
    table = Table("drafter", box=None, pad_edge=False)
    for stage in stages:
        table.add_column(stage, justify="right")
    for row in rows:
        table.add_row(row["drafter"], *(f"{row['stages'][s]:.3f}" if s in row["stages"] else "" for s in stages))
    return table
