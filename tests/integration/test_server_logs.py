"""Lines of the server's log: one about each request, with its id, its counts and times, and nobody's text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider import Runtime
from outrider.plans.errors import PlanError
from outrider.runtime.server import request_log
from outrider.runtime.server.config import Limits
from outrider.runtime.server.submitting import Submitter
from outrider.runtime.step_loop import StepLoop
from tests.integration.served import KEY, client_of, connected, get, listening, sent, wait_until

Patch = pytest.MonkeyPatch
SECRET = "wombat"
OURS: dict[str, Any] = {"ignore_eos": True}


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
    def fail(*_: object) -> None:
        raise PlanError("The device is lost.")

    with listening(Runtime.load(branch_plan, threads=1), log_requests=True) as address, client_of(address) as client:
        monkeypatch.setattr(StepLoop, "step", fail)
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
