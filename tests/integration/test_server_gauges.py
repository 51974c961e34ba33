"""Counts and gauges of the server, under our names and those that gateways read."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.runtime.step_loop import StepLoop
from tests.integration.served import client_of, get, listening, settle, wait_until

METRICS = Path(__file__).resolve().parents[2] / "runtime" / "server" / "metrics.md"
LONG: dict[str, Any] = {"max_new_tokens": 100, "drafter": "none", "ignore_eos": True}
OURS: dict[str, Any] = {"ignore_eos": True}


def scraped(address: str) -> dict[str, float]:
    """Samples by name; of the gateways' names those of the model and engine that they ask for, without these labels."""
    status, text = get(f"{address}/metrics")
    assert status == 200
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
                assert labels.pop("model_name", "toy") == "toy"
            name = sample.name + "".join(f"{{{key}={value}}}" for key, value in sorted(labels.items()))
            samples[name] = sample.value
    return samples


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Passes wait until they are let through: the function lets `count` through."""
    passes, original = [10**9], StepLoop.step

    def step(self: StepLoop, *arguments: Any) -> Any:
        until = time.monotonic() + 60
        while not passes[0]:
            assert time.monotonic() < until
            time.sleep(0.002)
        passes[0] -= 1
        return original(self, *arguments)

    def let_through(count: int) -> None:
        passes[0] = count

    monkeypatch.setattr(StepLoop, "step", step)
    return let_through


@pytest.mark.parametrize(
    ("plan", "mode", "rows"),
    [("branch_plan", "batching", 16), ("toy_plan", None, 1)],
)
def test_the_kv_caches_use_is_what_running_requests_have(
    plan: str, mode: Any, rows: int, request: pytest.FixtureRequest, gated: Callable[[int], None]
) -> None:
    config = SchedulerConfig(mode=mode)
    runtime = Runtime.load(request.getfixturevalue(plan), threads=1, scheduler=config)
    prompts = [[5] * 40, [6] * 12] if plan == "branch_plan" else [[5] * 40]
    with listening(runtime) as address:
        before = scraped(address)
        slots = before["outrider_kv_slots"]
        assert slots >= rows * 160
        assert before["outrider_kv_usage_ratio"] == before["vllm:kv_cache_usage_perc"] == 0
        gated(8)  # of which the prompts' chunks of 16 take some
        handles = [runtime.submit(prompt, **LONG) for prompt in prompts]
        wait_until(lambda: runtime.scheduler_stats.rounds == 8 and runtime.scheduler_stats.kv_used > 0, 20)
        stats, found = runtime.scheduler_stats, scraped(address)
        # All tokens have KV but the newest one of each; some of the last pass may be counted a pass later.
        tokens = sum(map(len, prompts))
        expected = tokens + stats.new_tokens - len(prompts)
        assert expected - 2 * len(prompts) <= stats.kv_used <= expected + len(prompts)
        assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == stats.kv_used / slots
        assert found["outrider_kv_usage_ratio"] == stats.kv_used / slots
        assert found["outrider_kv_reserved_ratio"] == (tokens + 100 * len(prompts)) / slots
        assert found["vllm:num_requests_running"] == len(prompts)
        gated(10**9)
        for handle in handles:
            handle.result(60)
        wait_until(lambda: runtime.scheduler_stats.kv_used == 0, 20)
        after = scraped(address)
        assert after["vllm:kv_cache_usage_perc"] == after["outrider_kv_reserved_ratio"] == 0


def test_counts_and_times_are_those_of_the_answers(branch_plan: Path) -> None:
    cache = PrefixCacheConfig(max_cached_tokens=4096)
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=cache)
    with listening(runtime) as address, client_of(address) as client:
        own: dict[str, Any] = {"model": "toy", "temperature": 0, "extra_body": OURS | {"drafter": "chain"}}
        whole = client.completions.create(prompt=[7, 8, 9] * 10, max_tokens=20, **own)
        pieces = client.completions.create(
            prompt=[7, 8, 9] * 10, max_tokens=20, n=2, stream=True, stream_options={"include_usage": True}, **own
        )
        usage = list(pieces)[-1].usage
        client.completions.create(prompt=[5], max_tokens=9, model="toy", extra_body=OURS | {"deadline": 1e-9})
        assert whole.usage is not None
        assert usage is not None
        settle(runtime)
        wait_until(lambda: scraped(address)["vllm:request_success_total{finished_reason=length}"] == 4, 20)
        found, stats = scraped(address), runtime.scheduler_stats
    assert (found["outrider_requests_submitted_total"], found["outrider_step_seconds_count"]) == (4, stats.rounds)
    new = whole.usage.completion_tokens + usage.completion_tokens
    assert found["vllm:generation_tokens_total"] == found["outrider_new_tokens_total"] == new == 60
    assert found["vllm:prompt_tokens_total"] == found["outrider_prompt_tokens_total"] == 90
    assert found["vllm:prefix_cache_queries_total"] == 90
    assert 29 <= found["vllm:prefix_cache_hits_total"] <= 58
    assert found["vllm:cache_config_info{block_size=16}{num_gpu_blocks=256}"] == 1
    assert found["vllm:num_preemptions_total"] == 0
    drafts = found["vllm:spec_decode_num_drafts_total"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == stats.drafted >= accepted == stats.accepted > 0
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    by_place = [value for name, value in found.items() if name.startswith(position)]
    assert sum(by_place) == accepted
    assert by_place == sorted(by_place, reverse=True)
    assert by_place[0] <= drafts
    assert found["vllm:request_queue_time_seconds_count"] == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time", "request_time_per_output_token"):
        assert found[f"vllm:{name}_seconds_count"] == 3, name
    assert found["outrider_time_to_first_token_seconds_sum"] == found["vllm:time_to_first_token_seconds_sum"]
    assert found["outrider_request_seconds_count"] == 2


def test_every_metric_is_in_the_table(branch_plan: Path) -> None:
    runtime = Runtime.load(branch_plan, threads=1, prefix_cache=PrefixCacheConfig(max_cached_tokens=256))
    with listening(runtime) as address:
        served = set(re.findall(r"^# TYPE (\S+) ", get(f"{address}/metrics")[1], re.MULTILINE))
    served = {name for name in served if not name.endswith("_created")}
    assert set(re.findall(r"`((?:vllm:|outrider_)\w+)`", METRICS.read_text(encoding="utf-8"))) == served
