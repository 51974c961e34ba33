"""What the server reports: counts and gauges, under our names and those of gateways, and a log line a request."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider import PrefixCacheConfig, Runtime, SchedulerConfig
from outrider.plans.errors import PlanError
from outrider.runtime.server import request_log
from outrider.runtime.server.config import Limits
from outrider.runtime.server.submitting import Submitter
from outrider.runtime.step_loop import StepLoop
from tests.integration.served import KEY, client_of, connected, get, listening, sent, settle, wait_until

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


Patch = pytest.MonkeyPatch
SECRET = "wombat"


class Lines(logging.Handler):
    """The lines that the server's formatter makes, in the test's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(request_log._Json())
        self.text = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [said for said in map(json.loads, self.text) if said["event"] == "request"]

    def of(self, request_id: str) -> dict[str, Any]:
        """The line of a request, once it is there."""
        wait_until(lambda: any(each["request_id"] == request_id for each in self.requests), 20)
        (line,) = (each for each in self.requests if each["request_id"] == request_id)
        return line


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, handler = logging.getLogger("outrider"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    assert SECRET not in "".join(handler.text)


@pytest.fixture(scope="module")
def runtime(branch_plan: Path) -> Runtime:
    return Runtime.load(branch_plan, threads=1)


@pytest.fixture(scope="module")
def address(runtime: Runtime) -> Iterator[str]:
    with listening(runtime, api_key=["other", KEY], log_requests=True) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_line(address: str, runtime: Runtime, lines: Lines, stream: bool) -> None:
    with client_of(address, KEY) as client:
        answer = client.completions.create(
            model="toy", prompt=f"import {SECRET}", n=2, max_tokens=12, temperature=0, stream=stream,
            extra_headers={"x-request-id": f"one-{stream}"}, extra_body=OURS | {"drafter": "chain"},
        )  # fmt: skip
        if stream:
            for _ in answer:
                pass
    fields = lines.of(f"one-{stream}")
    assert {
        "method": "POST", "path": "/v1/completions", "status": 200, "client": "key 1", "model": "toy",
        "stream": stream, "choices": 2, "new_tokens": 24, "finish_reason": "length", "drafter": "chain",
        "prompt_tokens": len(runtime.tokenizer.encode(f"import {SECRET}")), "level": "info",
        "logger": "outrider.requests",
    }.items() <= fields.items()  # fmt: skip
    assert fields["drafted"] >= fields["accepted"] > 0
    assert 0 <= fields["queue_ms"] <= fields["ttft_ms"] <= fields["total_ms"]
    assert KEY not in "".join(lines.text)


def test_the_line_of_a_refused_request_has_its_code_alone(address: str, lines: Lines) -> None:
    with client_of(address, KEY) as client:
        for status, asked in ((404, {"model": "other", "prompt": SECRET}), (400, {"model": "toy", "n": SECRET})):
            headers = {"x-request-id": f"no-{status}"}
            with pytest.raises(openai.APIStatusError) as refused:
                client.completions.create(extra_headers=headers, **{"prompt": [[SECRET]], **asked})
            assert refused.value.status_code == status
            fields = lines.of(headers["x-request-id"])
            assert (fields["status"], fields["error_type"]) == (status, "invalid_request_error")
            assert "error" not in fields
    for path, name in (("/v1/models", "keyless"), ("/health/nowhere", "no probe"), ("/health/ready", "probe")):
        get(f"{address}{path}", {"x-request-id": name})
    assert lines.of("keyless")["error_code"] == "invalid_api_key"
    assert "client" not in lines.of("keyless")
    get(f"{address}/v1/models", {"x-request-id": "last"})
    lines.of("last")
    assert [line["path"] for line in lines.requests if line["path"].startswith("/health")] == ["/health/nowhere"]


@pytest.mark.parametrize("log_requests", [True, False])
def test_a_fault_of_the_server_has_the_requests_id_and_no_text(
    branch_plan: Path, lines: Lines, monkeypatch: Patch, log_requests: bool
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(f"with {SECRET} in it")

    runtime = Runtime.load(branch_plan, threads=1)
    with listening(runtime, log_requests=log_requests) as address, client_of(address) as client:
        monkeypatch.setattr(Submitter, "submit", fail)
        with pytest.raises(openai.InternalServerError, match="under fault") as failed:
            client.completions.create(model="toy", prompt=SECRET, extra_headers={"x-request-id": "fault"})
    assert (failed.value.code, failed.value.request_id) == ("server_error", "fault")
    (fields,) = map(json.loads, lines.text)
    assert fields["level"] == "error"
    assert "fault" in (fields["request_id"] if log_requests else fields["message"])
    assert fields["exception"].endswith("ZeroDivisionError")
    assert "in fail" in fields["exception"]


def test_a_failed_pass_is_in_the_line_of_each_of_its_requests(
    branch_plan: Path, lines: Lines, monkeypatch: Patch
) -> None:
    with listening(Runtime.load(branch_plan, threads=1), log_requests=True) as address, client_of(address) as client:
        monkeypatch.setattr(StepLoop, "step", Mock(side_effect=PlanError("The device is lost.")))
        with pytest.raises(openai.InternalServerError, match="device is lost"):
            client.completions.create(model="toy", prompt="x", extra_headers={"x-request-id": "whole"})
        stream = client.completions.create(model="toy", prompt="x", stream=True, extra_headers={"x-request-id": "part"})
        with pytest.raises(openai.APIError, match="device is lost"):
            list(stream)
        for name, status in (("whole", 500), ("part", 200)):
            fields = lines.of(name)
            assert (fields["status"], fields["level"], fields["error"]) == (status, "error", "The device is lost.")
            assert (fields["error_code"], fields["finish_reason"]) == ("server_error", "error")


def test_requests_that_never_reach_the_application_have_lines(branch_plan: Path, lines: Lines) -> None:
    """With the id that their answers have; a body that comes too slowly has one as well, and no other."""
    limits = Limits(0.3, 0.3, max_connections=1)
    with listening(Runtime.load(branch_plan, threads=1), limits, log_requests=True) as address:
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nX-Request-Id: slow\r\n\r\n{"
        for data, code in (
            (b"no HTTP\r\n\r\n", "invalid_http"),
            (b"GET /", "request_timeout"),
            (post, "request_timeout"),
        ):
            head = sent(address, data).decode().lower()
            (request_id,) = (line[14:] for line in head.split("\r\n") if line.startswith("x-request-id: "))
            assert lines.of(request_id)["error_code"] == code
        assert lines.of("slow")["status"] == 408
        with connected(address):
            get(f"{address}/health", {"x-request-id": "many"})
        assert lines.of("many")["error_code"] == "too_many_connections"


def test_text_lines_cannot_be_forged(address: str, lines: Lines) -> None:
    lines.setFormatter(request_log._Text())
    get(f"{address}/v1/a%0Ab%20status=500%22", {"x-request-id": "forged", "Authorization": f"Bearer {KEY}"})
    wait_until(lambda: any("forged" in line for line in lines.text), 20)
    (line,) = (line for line in lines.text if "forged" in line)
    assert "\n" not in line
    assert r' path="/v1/a\nb status=500\""' in line
    assert " status=404 " in line
