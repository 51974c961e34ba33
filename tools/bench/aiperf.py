"""`--aiperf DIR`: the runs of every drafter as NVIDIA AIPerf summarises them, `profile_export_aiperf.json`.

Names, units and definitions are those of AIPerf's schema 1.5 (its page "`profile_export_aiperf.json` Schema", and its
metrics reference). A request is one generation: of a suite, a turn. Metrics of requests have their distribution, those
of the whole run one value under `avg`. Modes run by turns in one process, so that a drafter's `benchmark_duration` is
the sum of its own requests' times, and its throughputs are those of one request at a time.

What AIPerf writes of itself and of its client is left out: its version, its configuration, timestamps of requests.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from statistics import stdev

import numpy as np

from outrider import Stats
from outrider.plans.errors import OutriderError
from outrider.tools.bench.rows import Mode

EXPORT = "profile_export_aiperf.json"
SCHEMA = "1.5"
_SHARES = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Metric = dict[str, str | float | int]


def write_exports(folder: Path, modes: Sequence[Mode], began: str, options: argparse.Namespace) -> list[Path]:
    """Write `folder`/NAME/profile_export_aiperf.json of every mode; NAME is the drafter, and of several drafts of one
    drafter also the tree or the depth. `began` is ISO 8601.

    Raises `OutriderError` for what cannot be written.
    """
    ended = datetime.now().astimezone().isoformat(timespec="seconds")
    drafters = Counter(mode.variant.drafter for mode in modes)
    written = []
    for mode in modes:
        variant = mode.variant
        shape = (variant.tree or str(variant.depth)).replace("/", "-")
        name = variant.drafter if drafters[variant.drafter] == 1 else f"{variant.drafter}-{shape}"
        about = {
            "schema_version": SCHEMA,
            "start_time": began,
            "end_time": ended,
            "was_cancelled": False,
            "error_summary": [],
            "run_info": {"run_label": name, "cli_command": options.typed, "random_seed": options.sampling.seed},
        }
        path = folder / name / EXPORT
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(about | metrics(mode), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutriderError(
                f"{path} cannot be written ({error.strerror or error}); choose another --aiperf."
            ) from None
        written.append(path)
    return written


def metrics(mode: Mode) -> dict[str, Metric | dict[str, int]]:
    """A mode's runs as AIPerf's metrics, by name; those of speculation only where something was drafted."""
    stats = [run.stats for run in mode.runs]
    seconds = sum(s.total_ms for s in stats) / 1000
    asked, answered = sum(s.prompt_tokens for s in stats), sum(s.new_tokens for s in stats)
    token_ms = [ms for s in stats if (ms := _token_ms(s)) is not None]
    found: dict[str, Metric | dict[str, int]] = {
        "request_count": _value("requests", len(stats)),
        "request_throughput": _value("requests/sec", len(stats) / seconds),
        "request_latency": _spread("ms", [s.total_ms for s in stats]),
        "time_to_first_token": _spread("ms", [s.ttft_ms for s in stats]),
        "input_sequence_length": _spread("tokens", [s.prompt_tokens for s in stats]),
        "output_sequence_length": _spread("tokens", [s.new_tokens for s in stats]),
        "output_token_count": _spread("tokens", [s.new_tokens for s in stats]),
        "output_token_throughput": _value("tokens/sec", answered / seconds),
        "total_isl": _value("tokens", asked),
        "total_osl": _value("tokens", answered),
        "total_output_tokens": _value("tokens", answered),
        "benchmark_duration": _value("sec", seconds),
    }
    if token_ms:
        found["inter_token_latency"] = _spread("ms", token_ms)
        found["output_token_throughput_per_user"] = _spread("tokens/sec/user", [1000 / ms for ms in token_ms])
    return found | _speculation([s for s in stats if sum(s.rounds_by_accepted)])


def _token_ms(stats: Stats) -> float | None:
    """Milliseconds of a token behind the first span, which AIPerf takes to be one token unless a server says more."""
    behind = stats.new_tokens - stats.first_span
    spent = stats.total_ms - stats.ttft_ms
    return spent / behind if behind and spent > 0 else None


def _speculation(stats: Sequence[Stats]) -> dict[str, Metric | dict[str, int]]:
    """Of requests for which something was drafted; rounds without a draft are left out, as AIPerf's engines do."""
    if not stats:
        return {}
    steps = [sum(s.rounds_by_accepted) for s in stats]
    accepted, drafted = [s.accepted for s in stats], [s.drafted for s in stats]
    each = list(zip(accepted, drafted, steps, strict=True))
    pooled = [sum(counts) for counts in zip_longest(*(s.rounds_by_accepted for s in stats), fillvalue=0)]
    return {
        "spec_decode_acceptance_length": _spread("ratio", [1 + a / n for a, _, n in each]),
        "spec_decode_token_weighted_acceptance_length": _value("ratio", 1 + sum(accepted) / sum(steps)),
        "spec_decode_draft_acceptance_rate": _spread("%", [100 * a / d for a, d, _ in each]),
        "spec_decode_overall_draft_acceptance_rate": _value("%", 100 * sum(accepted) / sum(drafted)),
        "spec_decode_accepted_per_verified": _spread("ratio", [(a + n) / (d + n) for a, d, n in each]),
        "spec_decode_steps": _spread("count", steps),
        "spec_decode_accepted_draft_tokens": _spread("tokens", accepted),
        "spec_decode_draft_tokens": _spread("tokens", drafted),
        "total_spec_decode_steps": _value("count", sum(steps)),
        "total_accepted_draft_tokens": _value("tokens", sum(accepted)),
        "total_draft_tokens": _value("tokens", sum(drafted)),
        "pooled_spec_decode_acceptance_histogram": {
            str(tokens): rounds for tokens, rounds in enumerate(pooled) if rounds
        },
    }


def _value(unit: str, value: float) -> Metric:
    """A metric of the whole run."""
    return {"unit": unit, "avg": value}


def _spread(unit: str, values: Iterable[float]) -> Metric:
    """A metric of requests: percentiles are interpolated, `std` is that of a sample."""
    found = list(values)
    shares = np.percentile(found, _SHARES)
    return {
        "unit": unit,
        "avg": sum(found) / len(found),
        **{f"p{share}": float(value) for share, value in zip(_SHARES, shares, strict=True)},
        "min": min(found),
        "max": max(found),
        "std": stdev(found) if len(found) > 1 else 0.0,
        "count": len(found),
        "sum": sum(found),
    }
