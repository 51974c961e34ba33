"""Spans of requests: in memory, and as a collector receives them from a server process."""

from __future__ import annotations

import gzip
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from outrider import Runtime
from outrider.runtime.__main__ import main
from outrider.runtime.server.tracing import Tracing
from tests.integration.served import client_of, connected, get, listening, server_process, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
OURS: dict[str, Any] = {"ignore_eos": True, "drafter": "chain"}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def address(branch_plan: Path, exporter: InMemorySpanExporter) -> Iterator[str]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with listening(Runtime.load(branch_plan, threads=1), tracing=Tracing(provider)) as found:
        yield found


def spans_of(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The server's span of the one request since the last call, and the spans below it."""
    wait_until(lambda: any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()), 20)
    spans = exporter.get_finished_spans()
    exporter.clear()
    (server,) = (span for span in spans if span.kind is SpanKind.SERVER)
    below = [span for span in spans if span is not server]
    for span in below:
        assert span.parent is not None
        assert span.parent.span_id == server.context.span_id
        assert span.context.trace_id == server.context.trace_id
    return server, below


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_phases_below(address: str, exporter: InMemorySpanExporter, stream: bool) -> None:
    with client_of(address) as client:
        answer = client.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "wombat"}], max_completion_tokens=12, temperature=0.5,
            seed=3, n=2, stream=stream, extra_body=OURS, extra_headers=TRACEPARENT | {"x-request-id": "traced"},
        )  # fmt: skip
        identity = [piece.id for piece in answer][-1] if stream else answer.id
    server, below = spans_of(exporter)
    assert server.name == "chat toy"
    assert server.parent is not None
    assert (f"{server.context.trace_id:032x}", f"{server.parent.span_id:016x}") == (TRACE, PARENT)
    attributes = dict(server.attributes or {})
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "toy",
        "gen_ai.response.id": identity,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": stream,
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "outrider.request.id": "traced",
        "outrider.drafter": "chain",
    }.items() <= attributes.items()
    assert attributes["outrider.drafted_tokens"] >= attributes["outrider.accepted_tokens"]
    assert sorted(span.name for span in below) == ["decode"] * 2 + ["prefill"] * 2 + ["queue"] * 2
    for choice in range(2):
        own = {span.name: span for span in below if (span.attributes or {})["outrider.choice"] == choice}
        queue, prefill, decode = own["queue"], own["prefill"], own["decode"]
        assert server.start_time <= queue.start_time
        assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
        assert decode.start_time < decode.end_time <= server.end_time
        assert decode.attributes["gen_ai.usage.output_tokens"] == 12
        assert prefill.attributes["gen_ai.usage.input_tokens"] == attributes["gen_ai.usage.input_tokens"] > 0
    assert server.status.status_code is StatusCode.UNSET
    assert "wombat" not in server.to_json() + "".join(span.to_json() for span in below)


def test_a_refused_request_has_a_span_that_a_collector_accepts(address: str, exporter: InMemorySpanExporter) -> None:
    for path in ("/health/ready", "/metrics", "/v1/models"):
        assert get(f"{address}{path}")[0] == 200
    assert exporter.get_finished_spans() == ()
    asked = b'{"model": "\\ud800", "prompt": "x", "seed": 18446744073709551615, "max_tokens": 99999999999999999999}'
    assert get(f"{address}/v1/completions", {"Content-Type": "application/json"}, asked)[0] == 404
    server, below = spans_of(exporter)
    encode_spans([server])
    attributes = dict(server.attributes or {})
    assert (server.name, server.parent, below) == (r"text_completion \ud800", None, [])
    assert (attributes["http.response.status_code"], attributes["error.type"]) == (404, "model_not_found")
    assert server.status.status_code is StatusCode.UNSET  # the client's fault
    assert not {"gen_ai.request.seed", "gen_ai.request.max_tokens"} & set(attributes)


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """A collector of OTLP over HTTP: its address, and the paths and bodies that it has received."""
    received = list[tuple[str, ExportTraceServiceRequest]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def test_a_server_process_sends_its_spans_to_the_collector_that_the_environment_names(branch_plan: Path) -> None:
    """And writes nothing to standard error but JSON, whose lines have the trace's id."""
    with collector() as (endpoint, received):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_SERVICE_NAME": "a service",
            "OTEL_BSP_SCHEDULE_DELAY": "600000",  # so that the last spans are sent at the end, or never
        }
        arguments = ("--telemetry", "--log-format", "json")
        with server_process(branch_plan, *arguments, environment=environment) as server:
            wait_until(server.ready)
            own: dict[str, Any] = {"model": "toy", "prompt": "wombat", "max_tokens": 3}
            with client_of(server.address) as client:
                answer = client.completions.create(**own, extra_headers=TRACEPARENT)
            with connected(server.address) as plain:
                plain.sendall(b"no HTTP\r\n\r\n")
                assert b" 400 " in plain.recv(4096)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
            lines = [json.loads(line) for line in server.said.splitlines()]
    assert {path for path, _ in received} == {"/v1/traces"}
    (resource,) = (each for _, body in received for each in body.resource_spans)
    assert "a service" in {each.value.string_value for each in resource.resource.attributes}
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"text_completion toy", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert answer.id in {each.value.string_value for each in spans["text_completion toy"].attributes}
    (line,) = (line for line in lines if line["event"] == "request" and line.get("path") == "/v1/completions")
    assert (line["trace_id"], line["status"], line["new_tokens"]) == (TRACE, 200, 3)
    messages = [line["message"] for line in lines if line["event"] == "message"]
    assert "Invalid HTTP request received." in messages
    assert "wombat" not in json.dumps(lines)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER is 'zipkin'; set it to otlp, console or none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; traces are sent by http"),
    ],
)
def test_an_unknown_exporter_is_refused_before_the_plan_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    monkeypatch.setenv(variable, value)
    assert main(["serve", str(tmp_path / "none"), "--telemetry", "--port", "0"]) == 2
    assert words in capsys.readouterr().err
