"""AIPerf's metrics of hand-made runs whose figures are known."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

from outrider import Generation, Stats
from outrider.plans.errors import OutriderError
from outrider.runtime.generation import FinishReason
from outrider.runtime.sampling import SamplingParams
from outrider.tools.bench.aiperf import metrics, write_exports
from outrider.tools.bench.rows import Mode, Run
from outrider.tools.bench.shapes import PLAIN_DECODING, Variant

TREE = Variant("head.1", "head", "eagle3", "2/1/4", 4, 2, "coupled")


def run(total_ms: float, ttft_ms: float, new_tokens: int, **counts: Any) -> Run:
    stats = Stats(
        prompt_tokens=7, new_tokens=new_tokens, first_span=1, ttft_ms=ttft_ms, total_ms=total_ms, rounds=5, **counts
    )
    return Run(Generation("", [1] * new_tokens, FinishReason.LENGTH, stats), 1.0, Stats(), ())


def mode(*runs: Run, variant: Variant = TREE) -> Mode:
    return Mode(variant, list(runs))


def test_metrics_of_requests_are_those_that_aiperf_defines() -> None:
    found = metrics(mode(run(110, 10, 11), run(230, 30, 21), run(20, 20, 1)))
    latency = found["request_latency"]
    assert latency["unit"] == "ms"
    assert [latency[key] for key in ("avg", "min", "max", "count", "sum")] == [120, 20, 230, 3, 360]
    assert latency["std"] == stdev([110, 230, 20])
    assert latency["p90"] == pytest.approx(np.percentile([20, 110, 230], 90))
    assert set(latency) == {"unit", "avg", "min", "max", "std", "count", "sum"} | {
        f"p{share}" for share in (1, 5, 10, 25, 50, 75, 90, 95, 99)
    }
    assert found["time_to_first_token"]["avg"] == 20
    between = found["inter_token_latency"]  # none of a request of one token
    assert (between["min"], between["max"], between["count"]) == (10, 10, 2)
    assert found["output_token_throughput_per_user"]["avg"] == 100
    assert found["output_sequence_length"]["sum"] == 33
    assert found["input_sequence_length"]["avg"] == 7


def test_metrics_of_the_run_have_one_value() -> None:
    found = metrics(mode(run(1500, 10, 30), run(500, 10, 10)))
    assert {name: value for name, value in found.items() if set(value) == {"unit", "avg"}} == {
        "request_count": {"unit": "requests", "avg": 2},
        "request_throughput": {"unit": "requests/sec", "avg": 1},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 20},
        "total_isl": {"unit": "tokens", "avg": 14},
        "total_osl": {"unit": "tokens", "avg": 40},
        "total_output_tokens": {"unit": "tokens", "avg": 40},
        "benchmark_duration": {"unit": "sec", "avg": 2},
    }


def test_tokens_of_the_first_span_are_not_behind_it() -> None:
    one = run(110, 10, 11)
    one.stats.first_span = 6
    assert metrics(mode(one))["inter_token_latency"]["avg"] == 20
    one.stats.first_span = 11
    assert "inter_token_latency" not in metrics(mode(one))


def test_speculation_is_told_of_requests_that_drafted_alone() -> None:
    runs = [
        run(1, 1, 5, drafted=12, accepted=3, rounds_by_accepted=[1, 1, 1]),
        run(1, 1, 5, drafted=4, accepted=0, rounds_by_accepted=[1]),
        run(1, 1, 5),  # n-grams that foresaw nothing
    ]
    found = metrics(mode(*runs))
    length = found["spec_decode_acceptance_length"]
    assert (length["unit"], length["min"], length["max"], length["count"]) == ("ratio", 1, 2, 2)
    assert found["spec_decode_token_weighted_acceptance_length"] == {"unit": "ratio", "avg": 1 + 3 / 4}
    assert found["spec_decode_draft_acceptance_rate"]["max"] == 25
    assert found["spec_decode_overall_draft_acceptance_rate"] == {"unit": "%", "avg": 100 * 3 / 16}
    assert found["spec_decode_accepted_per_verified"]["max"] == 6 / 15
    assert found["spec_decode_steps"]["sum"] == found["total_spec_decode_steps"]["avg"] == 4
    assert found["total_accepted_draft_tokens"]["avg"] == 3
    assert found["total_draft_tokens"]["avg"] == 16
    assert found["pooled_spec_decode_acceptance_histogram"] == {"0": 2, "1": 1, "2": 1}
    assert not any("spec_decode" in name or "draft" in name for name in metrics(mode(run(1, 1, 5))))


def test_several_drafts_of_one_drafter_have_a_folder_each(tmp_path: Path) -> None:
    options = Namespace(typed="bench suite x", sampling=SamplingParams(temperature=0.5, seed=7))
    deeper = Variant("head.2", "head", "eagle3", "2/3/8", 8, 4, "coupled")
    chain = Variant("sure.1", "sure", "model", None, 7, 6, "coupled")
    modes = [mode(run(1, 1, 2), variant=variant) for variant in (PLAIN_DECODING, TREE, deeper, chain)]
    paths = write_exports(tmp_path, modes, "2026-01-01T00:00:00+00:00", options)
    assert [path.parent.name for path in paths] == ["none", "head-2-1-4", "head-2-3-8", "sure"]
    found = json.loads(paths[1].read_text())
    assert found["run_info"] == {"run_label": "head-2-1-4", "cli_command": "bench suite x", "random_seed": 7}
    assert (found["start_time"], found["was_cancelled"], found["error_summary"]) == (
        "2026-01-01T00:00:00+00:00", False, []
    )  # fmt: skip
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "none").write_text("x")
    with pytest.raises(OutriderError, match=r"cannot be written .*; choose another --aiperf"):
        write_exports(tmp_path / "other", modes[:1], "", options)
