"""The figures of a row: those of all runs of a mode, medians with their spread, ratios of pairs.

A figure that does not exist, such as the rate of runs that ended with their first span, is None, and no run without it
counts in a median. README.md says what each figure is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median, median_low
from typing import Any

from outrider import Session, Stats
from outrider.runtime.options.options import Options
from outrider.tools.bench.prompts import Prompts
from outrider.tools.bench.runs import Mode, Run, compare, first_tokens
from outrider.tools.measuring import middle, percentile, spread

_BINS = 16  # stretches of the context, at most, whose tokens' times are kept apart


def rows_of(
    session: Session, modes: Sequence[Mode], prompts: Prompts, settings: Options, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each of `modes`, plain decoding first, which have run on `prompts`; all with the `shared` columns."""
    compare(session, modes, prompts.ids, settings)
    plain = modes[0].runs
    return [
        shared
        | variant_columns(mode)
        | {"prompts_sha256": prompts.sha256}
        | summary(mode, plain)
        | {"by_task": by_task(mode.runs, plain, prompts)}
        for mode in modes
    ]


def summary(mode: Mode, plain: Sequence[Run]) -> dict[str, Any]:
    """Medians over all runs; speedups, the baseline's time over this one's, are those of pairs of the same prompt and
    repetition: `plain` has the baseline's runs in the order of `mode.runs`."""
    runs = mode.runs
    stats = [run.stats for run in runs]
    ratios = [speedup(run, p) for run, p in zip(runs, plain, strict=True)]
    decoding = [run.rate / p.rate for run, p in zip(runs, plain, strict=True) if run.rate and p.rate]
    rounds, drafted, accepted = (sum(getattr(s, key) for s in stats) for key in ("rounds", "drafted", "accepted"))
    expected = first_tokens(plain)
    same = sum(run.generation.token_ids == expected[run.prompt] for run in runs) if mode.promised else None
    steady = [run for run in runs if run.rounds]
    names = dict.fromkeys(name for run in steady for name, spent in run.steady.stage_ms.items() if spent)
    gaps = sorted(gap for run in runs for gap in run.gaps_ms)
    waits = sorted(wait for run in runs for wait in run.waits_ms)
    first = min(mode.divergences, key=lambda d: (d.prompt, d.index), default=None)
    return {
        **spread("speedup", ratios),
        **spread("decode_speedup", decoding),
        "tokens_per_verify": sum(s.new_tokens for s in stats) / rounds,
        "acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_by_depth": _by_depth(stats),
        **spread("tokens_per_second", (run.rate for run in runs)),
        "baseline_tokens_per_second": middle(p.rate for p in plain),
        "drafted": drafted + sum(s.left_out for s in stats),
        "evaluated": drafted,
        "accepted": accepted,
        "rounds": rounds,
        "plain_rounds": sum(s.plain_rounds for s in stats),
        **spread("ttft_ms", [s.ttft_ms for s in stats]),
        "ttft_ms_p99": percentile(sorted(s.ttft_ms for s in stats), 99),
        **{f"itl_ms_p{share}": percentile(waits, share) for share in (50, 90, 99)},
        **{f"tpot_ms_p{share}": percentile(gaps, share) for share in (50, 90, 99)},
        **spread("e2e_ms", [s.total_ms for s in stats]),
        "round_ms": _per_round(steady, [run.wall_ms for run in steady]),
        "engine_ms": _per_round(steady, [run.steady.engine_ms for run in steady]),
        "host_gap_ms": _per_round(steady, [run.wall_ms - run.steady.engine_ms for run in steady]),
        "stages": {
            mode.variant.drafter if name == mode.variant.name else name: _per_round(
                steady, [run.steady.stage_ms[name] for run in steady]
            )
            for name in names
        },
        "ms_along_context": _along_context(runs),
        "samples": {
            "ttft_ms": [s.ttft_ms for s in stats],
            "itl_ms": [list(run.waits_ms) for run in runs],
            "e2e_ms": [s.total_ms for s in stats],
        },
        "same_tokens": None if same is None else same == len(runs),
        "same_runs": same,
        "runs": len(runs),
        "first_divergence": None if first is None else first.index,
        "divergence_margin": None if first is None else first.margin,
        "divergence_prompt": None if first is None else first.prompt,
        "divergence_prompt_tokens": None if first is None else first.prompt_tokens,
    }


def speedup(run: Run, plain: Run) -> float:
    """Plain decoding's time for a token of a whole generation, prompt included, over this run's. Both have as many
    tokens, but where the runs' tokens are not promised to be the same and their texts end by themselves."""
    more = run.stats.new_tokens / plain.stats.new_tokens
    return more * plain.stats.total_ms / run.stats.total_ms


def variant_columns(mode: Mode) -> dict[str, Any]:
    """Key of a row: what ran, and after how many tokens."""
    variant = asdict(mode.variant)
    del variant["name"]  # in a temporary plan
    return variant | {
        "synthetic_accept": mode.synthetic,
        "prompts": len({run.prompt for run in mode.runs}),
        "prompt_tokens": median(run.stats.prompt_tokens for run in mode.runs),
        "new_tokens": median_low(run.stats.new_tokens for run in mode.runs),
    }


def _along_context(runs: Sequence[Run]) -> list[dict[str, float]]:
    """Median time of a token by how many tokens stand before it; of each stretch of the context, its middle."""
    timed = [
        (run.stats.prompt_tokens + run.stats.first_span + place, gap)
        for run in runs
        for place, gap in enumerate(run.gaps_ms)
    ]
    if not timed:
        return []
    places = [place for place, _ in timed]
    width = 1
    while max(places) // width - min(places) // width >= _BINS:
        width *= 2
    found: dict[int, list[float]] = {}
    for place, gap in timed:
        found.setdefault(place // width, []).append(gap)
    return [{"tokens": (index + 0.5) * width, "ms": median(gaps)} for index, gaps in sorted(found.items())]


def _by_depth(stats: Iterable[Stats]) -> list[float]:
    """At index d, the share of rounds with a draft that accepted more than d of its tokens."""
    whole = Stats()
    for one in stats:
        for accepted, rounds in enumerate(one.rounds_by_accepted):
            for _ in range(rounds):
                whole.note_accepted(accepted)
    return whole.acceptance_by_depth


def _per_round(runs: Sequence[Run], ms: Sequence[float]) -> float | None:
    """Median over runs of what a round took; None where all were too short."""
    return middle(spent / run.rounds for run, spent in zip(runs, ms, strict=True))


def by_task(runs: Sequence[Run], plain: Sequence[Run], prompts: Prompts) -> dict[str, dict[str, Any]]:
    """The main figures of a drafter's runs on each task's prompts, as in its whole row."""
    found = {}
    for task in dict.fromkeys(task for task in prompts.tasks if task):
        pairs = [(run, p) for run, p in zip(runs, plain, strict=True) if prompts.tasks[run.prompt] == task]
        stats = [run.stats for run, _ in pairs]
        of = prompts.select(task)
        drafted = sum(s.drafted for s in stats)
        found[task] = {
            "task": task,
            "prompts": len(of.ids),
            "prompts_sha256": of.sha256,
            "prompt_tokens": median(s.prompt_tokens for s in stats),
            "runs": len(pairs),
            "speedup": median(speedup(run, p) for run, p in pairs),
            "tokens_per_verify": sum(s.new_tokens for s in stats) / sum(s.rounds for s in stats),
            "acceptance_rate": sum(s.accepted for s in stats) / drafted if drafted else None,
            "tokens_per_second": middle(run.rate for run, _ in pairs),
            "ttft_ms": median(s.ttft_ms for s in stats),
        }
    return found
