"""Summaries of alternating runs: the figures of each mode, medians with their spread, ratios of pairs.

A figure that does not exist, such as the rate of runs that ended with their first span, is None, and no run without it
counts in a median. `columns.py` says what each figure is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median, median_low
from typing import Any

from outrider import Generation, Stats
from outrider.tools.bench.shapes import Variant

OPENING = 2  # rounds that stage times leave out: one ends the prompt, in the next a drafter reads it
_BINS = 16  # stretches of the context, at most, whose tokens' times are told apart


@dataclass(frozen=True)
class Run:
    """One generation. `wall_ms` and `steady` are of its rounds after the opening, by the wall clock and by stage.
    `gaps_ms` has the time since the previous token for each token after the first span, a span's time divided evenly;
    `waits_ms` has the undivided time of each such span: how long a user waits for it."""

    generation: Generation
    wall_ms: float
    steady: Stats
    gaps_ms: tuple[float, ...]
    prompt: int = 0
    waits_ms: tuple[float, ...] = ()

    @property
    def stats(self) -> Stats:
        return self.generation.stats

    @property
    def rounds(self) -> int:
        """Rounds behind the opening."""
        return max(self.stats.rounds - OPENING, 0)

    @property
    def rate(self) -> float | None:
        """Tokens a second behind the first span; None where there are none."""
        return self.stats.decode_tokens_per_second or None


@dataclass(frozen=True)
class Divergence:
    """Where a run's tokens first differ from plain decoding's, and how nearly the latter chose otherwise (logits).

    `prompt` and `index`, of a generated token, count from 0.
    """

    prompt: int
    prompt_tokens: int
    index: int
    margin: float


@dataclass
class Mode:
    """All runs of one variant, in the order in which plain decoding ran beside them.

    `synthetic`: the tokens of a draft that were accepted by force. `promised`: whether the tokens are to be those of
    plain decoding; forced ones are not, nor at a temperature those that are accepted by rejection.
    """

    variant: Variant
    runs: list[Run] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    synthetic: int | None = None
    promised: bool = True


def first_tokens(plain: Sequence[Run]) -> dict[int, list[int]]:
    """By index of prompt, what plain decoding generated first: what every run behind that prompt is compared with."""
    found: dict[int, list[int]] = {}
    for run in plain:
        found.setdefault(run.prompt, run.generation.token_ids)
    return found


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


def percentile(ranked: Sequence[float], share: int) -> float | None:
    """The smallest value that at least `share` % do not exceed; None of none."""
    return ranked[max(ceil(len(ranked) * share / 100) - 1, 0)] if ranked else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that there are."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def variant_columns(mode: Mode) -> dict[str, Any]:
    """Key of a row: what ran, and behind how many tokens."""
    variant = mode.variant
    return {
        "drafter": variant.drafter,
        "kind": variant.kind,
        "tree": variant.tree,
        "nodes": variant.nodes,
        "depth": variant.depth,
        "acceptance": variant.acceptance,
        "otherwise": variant.otherwise,
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


def spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """Median, 10th and 90th percentile of those that there are."""
    ranked = sorted(value for value in values if value is not None)
    return {name: middle(ranked), f"{name}_p10": percentile(ranked, 10), f"{name}_p90": percentile(ranked, 90)}


def _per_round(runs: Sequence[Run], ms: Sequence[float]) -> float | None:
    """Median over runs of what a round took; None where all were too short to tell."""
    return middle(spent / run.rounds for run, spent in zip(runs, ms, strict=True))
