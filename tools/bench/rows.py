"""What alternating runs amount to: the figures of each mode, medians with their spread, ratios of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from typing import Any

from runtime import Generation, Stats
from tools.bench.shapes import Variant

OPENING = 2  # rounds that stage times leave out: one ends the prompt, in the next a drafter reads it
_BINS = 16  # stretches of the context, at most, whose tokens' times are told apart


@dataclass(frozen=True)
class Run:
    """One generation. `wall_ms` and `steady` are of its rounds behind the opening, by the wall clock and by stage;
    `gaps_ms` of every token behind the first span, the time since the one before, that of a span divided evenly."""

    generation: Generation
    wall_ms: float
    steady: Stats
    gaps_ms: tuple[float, ...]
    prompt: int = 0

    @property
    def stats(self) -> Stats:
        return self.generation.stats

    @property
    def rounds(self) -> int:
        """Rounds behind the opening."""
        return max(self.stats.rounds - OPENING, 0)


@dataclass(frozen=True)
class Divergence:
    """Where a run's tokens first differ from plain decoding's, and how nearly the latter chose otherwise (logits)."""

    prompt: int
    index: int
    margin: float


@dataclass
class Mode:
    """All runs of one variant, in the order in which plain decoding ran beside them.

    `synthetic`: the tokens of a draft that were accepted by force, so that the generated tokens are not the target's.
    """

    variant: Variant
    runs: list[Run] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    synthetic: int | None = None


def summary(mode: Mode, plain: Sequence[Run]) -> dict[str, Any]:
    """Medians over all runs; speedups are those of pairs of the same prompt and repetition.

    `speedup` has the prompt in it, `decode_speedup` begins behind the first token. `drafted` and `evaluated` are the
    same here: every drafted token is evaluated by the target.
    """
    runs = mode.runs
    stats = [run.stats for run in runs]
    rates = [s.decode_tokens_per_second for s in stats]
    ratios = [p.stats.total_ms / run.stats.total_ms for run, p in zip(runs, plain, strict=True)]
    decoding = [
        run.stats.decode_tokens_per_second / rate
        for run, p in zip(runs, plain, strict=True)
        if (rate := p.stats.decode_tokens_per_second)
    ]
    rounds, drafted, accepted = (sum(getattr(s, key) for s in stats) for key in ("rounds", "drafted", "accepted"))
    same = (
        None
        if mode.synthetic is not None
        else sum(run.generation.token_ids == p.generation.token_ids for run, p in zip(runs, plain, strict=True))
    )
    steady = [run for run in runs if run.rounds]
    names = dict.fromkeys(name for run in steady for name, spent in run.steady.stage_ms.items() if spent)
    gaps = sorted(gap for run in runs for gap in run.gaps_ms)
    first = min(mode.divergences, key=lambda d: (d.prompt, d.index), default=None)
    return {
        **spread("speedup", ratios),
        **spread("decode_speedup", decoding or [0.0]),
        "tokens_per_verify": sum(s.new_tokens for s in stats) / rounds,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_by_depth": _by_depth(stats),
        **spread("tokens_per_second", rates),
        "baseline_tokens_per_second": median(p.stats.decode_tokens_per_second for p in plain),
        "drafted": drafted,
        "evaluated": drafted,
        "accepted": accepted,
        "rounds": rounds,
        "plain_rounds": sum(s.plain_rounds for s in stats),
        **spread("ttft_ms", [s.ttft_ms for s in stats]),
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
        "same_tokens": None if same is None else same == len(runs),
        "same_runs": same,
        "runs": len(runs),
        "first_divergence": None if first is None else first.index,
        "divergence_margin": None if first is None else first.margin,
    }


def percentile(ranked: Sequence[float], share: int) -> float:
    """The smallest value that at least `share` % do not exceed; 0 of none."""
    return ranked[max(ceil(len(ranked) * share / 100) - 1, 0)] if ranked else 0.0


def variant_columns(mode: Mode) -> dict[str, Any]:
    """Of a row: what ran, and behind how many tokens."""
    variant = mode.variant
    return {
        "drafter": variant.drafter,
        "kind": variant.kind,
        "tree": variant.tree,
        "nodes": variant.nodes,
        "depth": variant.depth,
        "synthetic_accept": mode.synthetic,
        "prompts": len({run.prompt for run in mode.runs}),
        "prompt_tokens": median(run.stats.prompt_tokens for run in mode.runs),
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


def spread(name: str, values: Iterable[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ranked = sorted(values)
    return {name: median(ranked), f"{name}_p10": percentile(ranked, 10), f"{name}_p90": percentile(ranked, 90)}


def _per_round(runs: Sequence[Run], ms: Sequence[float]) -> float:
    """Median over runs of what a round took; 0 where all were too short to tell."""
    return median(spent / run.rounds for run, spent in zip(runs, ms, strict=True)) if runs else 0.0
