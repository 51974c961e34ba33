"""The server on a Ray cluster of two nodes: the answers of one server."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import ray
from ray import serve

from outrider import Runtime, SchedulerConfig
from outrider.plans.plan import open_plan
from outrider.runtime.ray_serve.application import REPLICA, build
from outrider.runtime.ray_serve.remote_runtime import RemoteRuntime
from outrider.runtime.ray_serve.settings import Settings
from outrider.runtime.ray_serve.streams import sender
from outrider.tools.lab.serving.routing import Talk, measure_way
from tests.integration.ray_cluster import Deployed, deployed, two_nodes
from tests.integration.served import KEY, client_of, get, listening, wait_until
from tests.integration.test_server_tracing import collector
from tests.integration.test_tools import ASK, HERMES, TOOLS
from tests.plans.damage import TEMPLATE, list_again

PROMPT = "def main(x): return"
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
FORM = {"type": "json_schema", "json_schema": {"name": "form", "schema": TOOLS[0]["function"]["parameters"]}}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "choices": {"n": 3, "prompt": [PROMPT, "import os\n"], "logprobs": 3, **SAMPLED},
    "stop": {"stop": ["e", "\n"], "min_tokens": 3, "drafter": "head", **SAMPLED},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{4,40}=[0-9]{1,8};"}, **SAMPLED},
}
CHATS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 2, **SAMPLED},
    "form": {"response_format": FORM, "temperature": 1.0, "seed": 1, "max_tokens": 100},
    "tools": {"tools": TOOLS[:1], "tool_choice": "required", "temperature": 1.0, "seed": 2, "max_tokens": 100},
}
WRONG: list[dict[str, Any]] = [
    {"temperature": 3},
    {"model": "another"},
    {"prompt": [9999]},
    {"structured_outputs": {"regex": "("}},
    {"prompt": [5] * 500},
]


@pytest.fixture(scope="module")
def plan(branch_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's plan, with a chat template that knows tools."""
    plan = shutil.copytree(branch_plan, tmp_path_factory.mktemp("tools") / "plan")
    (plan / TEMPLATE).write_text(HERMES, encoding="utf-8")
    list_again(plan)
    return plan


@pytest.fixture(scope="module")
def single(plan: Path) -> Iterator[str]:
    """The address of one server."""
    with listening(Runtime.load(plan, threads=1)) as address:
        yield address


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with two_nodes() as (_, address):
        yield address


def settings_of(plan: Path, **own: Any) -> Settings:
    return Settings(**{"plan": plan, "model_name": "toy", "cache_bytes": 2**24, "drain_seconds": 2.0, **own})


@pytest.fixture(scope="module")
def served(cluster: str, plan: Path) -> Iterator[Deployed]:
    with deployed(cluster, "two", settings_of(plan, replicas=2, replica_cpus=0.1)) as found:
        yield found


@pytest.fixture
def client(served: Deployed) -> Iterator[openai.OpenAI]:
    with client_of(served.address) as found:
        yield found


def post(address: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    status, text = get(f"{address}/v1/{path}", headers, json.dumps(body).encode())
    if not body.get("stream"):
        return status, json.loads(text)
    return status, [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def same(answer: Any) -> Any:
    """An answer without ids, times, and how much was drafted or cached."""
    if isinstance(answer, list):
        return [same(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    left_out = ("id", "created", "metrics", "prompt_tokens_details")
    return {key: same(value) for key, value in answer.items() if key not in left_out}


def joined(pieces: list[Any]) -> Any:
    """The content of each choice of a stream, independent of where it was cut."""
    choices: dict[int, list[Any]] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            delta = choice.get("delta", choice)
            said = choices.setdefault(choice["index"], ["", "", [], None])
            said[0] += delta.get("content") or delta.get("text") or ""
            said[1] += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", ()))
            of = choice["logprobs"] or {}
            said[2] += of.get("content") or [*zip(of.get("tokens", ()), of.get("token_logprobs", ()), strict=True)]
            said[3] = choice["finish_reason"] or said[3]
    return choices, same([piece.get("usage") for piece in pieces if piece.get("usage")])


def test_answers_are_those_of_one_server(served: Deployed, single: str) -> None:
    asked = [("completions", {"prompt": PROMPT, "max_tokens": 30, **own}) for own in COMPLETIONS.values()]
    asked += [("chat/completions", {"messages": ASK, "max_tokens": 30, **own}) for own in CHATS.values()]
    for path, own in asked:
        body = {"model": "toy", "seed": 3, **own}
        status, expected = post(single, path, body)
        assert status == 200, expected
        assert same(post(served.address, path, body)[1]) == same(expected)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        status, pieces = post(served.address, path, body)
        assert status == 200
        assert joined(pieces) == joined(post(single, path, body)[1])


def test_mistakes_have_the_errors_of_one_server(served: Deployed, single: str) -> None:
    for own in WRONG:
        body = {"model": "toy", "prompt": PROMPT, "max_tokens": 4, **own}
        expected = post(single, "completions", body)
        assert 400 <= expected[0] < 500
        assert post(served.address, "completions", body) == expected


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_leaves_nothing_running(served: Deployed, client: openai.OpenAI, stream: bool) -> None:
    served.settle(2)
    before = sum(each.stats.new_tokens for each in served.replicas())
    ids = [[5 + place, 6, 7] for place in range(4)]
    body: dict[str, Any] = {"model": "toy", "prompt": ids, "n": 8, "max_tokens": 150, "logprobs": 20, **SAMPLED}
    body |= {"stream": stream, "extra_body": {"ignore_eos": True, "drafter": "none"}}

    def ask(_: int) -> None:
        if stream:
            with client.completions.create(**body) as pieces:
                next(iter(pieces))
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.5).completions.create(**body)

    with ThreadPoolExecutor(4) as clients:
        list(clients.map(ask, range(4)))
    wait_until(lambda: not served.running(), 60)
    assert sum(each.stats.new_tokens for each in served.replicas()) - before < 4 * 32 * 150 / 2


@pytest.mark.long
def test_conversations_stay_with_the_replica_that_holds_them(cluster: str, plan: Path) -> None:
    texts = [[(7 * place + each) % 290 for each in range(200)] for place in range(6)]
    talk = Talk([[ids[:16], *([ids[16 * turn]] for turn in range(1, 4))] for ids in texts], 24)
    own = {"replicas": 2, "replica_cpus": 0.1}
    found = {
        way: measure_way(settings_of(plan, routing=way, **own), open_plan(plan), talk)
        for way in ("prefix", "round-robin")
    }
    assert found["prefix"]["answers"] == found["round-robin"]["answers"]
    assert found["prefix"]["computed"] <= 6 * (16 + 3 * 2)
    assert found["prefix"]["computed"] < 0.6 * found["round-robin"]["computed"]
    # All six begin at once, each where the load is least: where one replica is slow, up to five go to the other.
    assert found["prefix"]["busiest"] <= 20


@pytest.mark.long
def test_ingresses_learn_what_replicas_hold(cluster: str, plan: Path) -> None:
    """This process routes as an ingress does, and has not seen what came over HTTP."""
    settings = settings_of(plan, replicas=2, replica_cpus=0.1, ingresses=2, max_body_bytes=10_000)
    with deployed(cluster, "shared", settings) as served:
        prompts = [[place] * 64 for place in range(5, 13)]
        for prompt in prompts:
            assert post(served.address, "completions", {"model": "toy", "prompt": prompt, "max_tokens": 1})[0] == 200
        holders = [each.stats.prompt_tokens // 64 for each in served.replicas()]
        assert sum(holders) == 8
        assert all(holders)
        samples = [line for line in get(f"{served.address}/metrics")[1].splitlines() if not line.startswith("#")]
        assert all('ingress="' in line for line in samples)
        time.sleep(6)  # for the replicas to report

        async def ask() -> None:
            replicas = serve.get_deployment_handle(REPLICA, "shared")
            remote = RemoteRuntime(open_plan(plan), sender(replicas), SchedulerConfig())
            for prompt in prompts:
                await remote.submit_all([(prompt, {"max_new_tokens": 1})])[0]

        asyncio.run(ask())
        stats = [each.stats for each in served.replicas()]
        assert sum(each.prompt_tokens for each in stats) == 16 * 64 + 2  # to warm up
        assert sum(each.reused_tokens for each in stats) == 8 * 63


def logs_of_ingresses() -> list[dict[str, Any]]:
    """The lines about requests in Ray's log files on this machine."""
    files = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("worker-*.err")
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    found = [json.loads(line) for line in lines if line.startswith('{"time"')]
    return [line for line in found if line["event"] == "request"]


@pytest.mark.long
def test_lines_traces_and_budgets(cluster: str, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans go where this process's environment says, and the last ones when the application ends."""
    with collector() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # so that they are sent at the end, or never
        own = {"log_format": "json", "telemetry": True, "tokens_per_minute": 100, "api_keys": (KEY,), "ingresses": 2}
        settings = settings_of(plan, replicas=1, replica_cpus=0.1, **own)
        options = build(settings)._bound_deployment.ray_actor_options
        assert options["runtime_env"]["env_vars"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
        assert "OTEL_EXPORTER_OTLP_HEADERS" not in options["runtime_env"]["env_vars"]
        with deployed(cluster, "shared", settings) as served, client_of(served.address, KEY) as client:
            raw = client.completions.with_raw_response
            answer = raw.create(model="toy", prompt="x", max_tokens=3, extra_headers={"x-request-id": "traced"})
            assert answer.headers["x-ratelimit-limit-tokens"] == "50"  # this ingress's half
            assert get(f"{served.address}/health/ready", {"x-request-id": "probe"})[0] == 200
            assert received == []
        wait_until(lambda: bool(received), 20)
    spans = {
        span.name for _, body in received for each in body.resource_spans for scope in each.scope_spans
        for span in scope.spans
    }  # fmt: skip
    assert spans == {"text_completion toy", "queue", "prefill", "decode"}
    (line,) = logs_of_ingresses()
    assert (line["path"], line["request_id"], line["client"]) == ("/v1/completions", "traced", "key 0")
    assert (line["status"], line["new_tokens"]) == (200, answer.parse().usage.completion_tokens)


@pytest.mark.long
def test_keys_a_deadline_and_the_end(cluster: str, plan: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of clients\nsecond\n")
    keys = {"api_keys": ("first",), "api_key_file": file, "max_waiting_per_key": 30}
    settings = settings_of(plan, replicas=1, replica_cpus=0.1, **keys)
    with deployed(cluster, "keys", settings) as served, client_of(served.address, "second") as client:
        assert post(served.address, "completions", {"model": "toy", "prompt": "x"})[0] == 401
        assert client.models.list().data[0].id == "toy"
        body: dict[str, Any] = {"model": "toy", "prompt": [[5], [6]], "n": 16, "max_tokens": 155, "logprobs": 20}
        extra = {"ignore_eos": True, "drafter": "none"}
        found = client.completions.create(**body, extra_body={**extra, "deadline": 0.1})
        assert {choice.finish_reason for choice in found.choices} == {"length"}
        assert found.usage is not None
        assert found.usage.completion_tokens < 32 * 155
        with pytest.raises(openai.BadRequestError, match=r"48 requests are made at once, and at most .* make fewer"):
            client.completions.create(**{**body, "prompt": [[5], [6], [7]]}, extra_body=extra)
        pieces = iter(client.completions.create(**body, stream=True, extra_body=extra))
        next(pieces)
        assert served.ingress.broadcast("drain", 0.0).results(timeout_s=20) == [False]
        with pytest.raises(openai.APIError, match="The server is shutting down: the answer was cut off"):
            list(pieces)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            client.completions.create(model="toy", prompt="x")
