"""What is told of requests: after a prefix as without one, and of faults no text."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from outrider.runtime.server.observer import Endings, Listener, Observer
from outrider.runtime.server.request_log import log_fault, log_request
from outrider.runtime.server.tracing import Tracing


async def nothing() -> Message:
    return {"type": "http.disconnect"}


async def unread(_: Message) -> None:
    pass


@pytest.mark.parametrize("root", ["", "/llm", "/v1", "/a/b/"])
def test_a_request_behind_a_prefix_is_traced_and_its_probes_are_not_logged(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    application = Observer(PlainTextResponse("said"), Endings([tracing.end, log_request]), tracing.begin)

    async def ask(method: str, path: str) -> None:
        where = {"path": root.rstrip("/") + path, "root_path": root, "query_string": b"", "scheme": "http"}
        await application({"type": "http", "method": method, "headers": [], **where}, nothing, unread)

    with caplog.at_level(logging.DEBUG, "outrider.requests"):
        asyncio.run(ask("POST", "/v1/completions"))
        asyncio.run(ask("GET", "/health/ready"))
        asyncio.run(ask("GET", "/metrics"))
    (span,) = exporter.get_finished_spans()
    said = dict(span.attributes or {})
    assert (said["http.route"], said["url.path"]) == ("/v1/completions", root.rstrip("/") + "/v1/completions")
    assert [line.levelno for line in caplog.records] == [logging.INFO, logging.DEBUG, logging.DEBUG]
    assert caplog.records[0].__dict__["fields"]["path"] == "/v1/completions"


@pytest.mark.parametrize("listener", [log_fault, log_request])
def test_a_fault_is_told_by_place_and_kind_to_any_formatter(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            int("wombat")
        except ValueError as error:
            raise ZeroDivisionError("with a wombat") from error

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Observer(fail, Endings([listener]))(scope, nothing, unread))
    (record,) = caplog.records
    said = logging.Formatter().format(record)
    assert said.endswith("ZeroDivisionError")
    assert "in fail" in said
    assert "wombat" not in said.replace('int("wombat")', "").replace('("with a wombat")', "")  # lines of this file
