"""What is told of requests to an application that is mounted somewhere, as behind Ray's `route_prefix`."""

from __future__ import annotations

import asyncio
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.responses import PlainTextResponse
from starlette.types import Message

from runtime.server.observer import Endings, Observer
from runtime.server.request_log import log_request
from runtime.server.tracing import Tracing


@pytest.mark.parametrize("root", ["", "/llm", "/v1", "/a/b/"])
def test_a_request_behind_a_prefix_is_traced_and_its_probes_are_not_logged(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    application = Observer(PlainTextResponse("said"), Endings([tracing.end, log_request]), tracing.begin)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        pass

    async def ask(method: str, path: str) -> None:
        where = {"path": root.rstrip("/") + path, "root_path": root, "query_string": b"", "scheme": "http"}
        await application({"type": "http", "method": method, "headers": [], **where}, receive, send)

    with caplog.at_level(logging.DEBUG, "outrider.requests"):
        asyncio.run(ask("POST", "/v1/completions"))
        asyncio.run(ask("GET", "/health/ready"))
        asyncio.run(ask("GET", "/metrics"))
    (span,) = exporter.get_finished_spans()
    said = dict(span.attributes or {})
    assert (said["http.route"], said["url.path"]) == ("/v1/completions", root.rstrip("/") + "/v1/completions")
    assert [line.levelno for line in caplog.records] == [logging.INFO, logging.DEBUG, logging.DEBUG]
    assert caplog.records[0].__dict__["fields"]["path"] == "/v1/completions"
