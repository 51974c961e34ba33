"""A span for each request that generates, with the attributes of OpenTelemetry's conventions for generative AI (1.41).

The span stands below the one that the request's `traceparent` names. Below it, each choice has spans of its time in the
queue, of its prompt and of its decoding, from the statistics that are kept anyway: tracing costs the step loop nothing.
No span holds text of prompts or answers. Needs the extra `telemetry`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from opentelemetry.propagate import extract
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import TracerProvider as Provider
from starlette.requests import Request

from outrider.plans.errors import RequestError
from outrider.runtime.generation import Generation
from outrider.runtime.options.options import OPTIONS
from outrider.runtime.server.generation_request import ChatRequest
from outrider.runtime.server.record import Record

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
_TRACED = ("top_k", "seed", "frequency_penalty", "presence_penalty")  # where they are not at their defaults
_LONGEST = 200  # characters of a model's name
_FLUSH_SECONDS = 5.0  # for the last spans to reach their collector


class Tracing:
    """Makes the spans of requests, by any provider of tracers.

    `begin` at a request's head, `end` once it is over: when its answer is, and nothing of it runs any longer.
    """

    def __init__(self, provider: Provider) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("outrider")

    def begin(self, record: Record, request: Request) -> None:
        operation = _OPERATIONS.get(record.path)
        if operation is None or record.method != "POST":
            return
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "http.request.method": record.method,
            "url.path": str(request.scope["path"]),
            "url.scheme": request.url.scheme,
            "http.route": record.path,
            "outrider.request.id": record.request_id,
        }
        server = request.scope.get("server")
        if server is not None and server[1] is not None:
            attributes |= {"server.address": server[0], "server.port": server[1]}
        record.span = self._tracer.start_span(
            operation, extract(request.headers), SpanKind.SERVER, attributes, start_time=record.began_ns
        )

    def end(self, record: Record) -> None:
        span: Span | None = record.span
        if span is None:
            return
        for key, value in _attributes(record):
            if not isinstance(value, int) or -(2**63) <= value < 2**63:  # what the protocol holds
                span.set_attribute(key, value)
        if record.asked is not None:
            span.update_name(f"{_OPERATIONS[record.path]} {_plain(record.asked.model or '')}")
        if record.error is not None:
            span.set_attribute("error.type", record.error.code or str(record.status))
        if record.fault is not None or record.status >= 500 or (record.error and record.error.status >= 500):
            span.set_status(Status(StatusCode.ERROR, None if record.error is None else str(record.error)))
        for choice, found in enumerate(record.found):
            self._choice(record, span, choice, found)
        span.end(record.began_ns + _ns(record.seconds))

    def _choice(self, record: Record, span: Span, choice: int, found: Generation) -> None:
        """Spans of a choice's phases, one after the other. Those of several prompts and choices lie side by side."""
        context, stats = set_span_in_context(span), found.stats
        at = record.began_ns + _ns(record.submitted_seconds)
        own = {"outrider.choice": choice}
        phases = [("queue", stats.queued_ms, own)]
        if stats.new_tokens:
            prompt = {
                "gen_ai.usage.input_tokens": stats.prompt_tokens,
                "outrider.reused_tokens": stats.reused_tokens,
            }
            phases.append(("prefill", stats.ttft_ms, own | prompt))
            new = {
                "gen_ai.usage.output_tokens": stats.new_tokens,
                "outrider.rounds": stats.rounds,
                "outrider.drafted_tokens": stats.drafted,
                "outrider.accepted_tokens": stats.accepted,
            }
            phases.append(("decode", stats.total_ms - stats.ttft_ms, own | new))
        for name, milliseconds, attributes in phases:
            until = at + _ns(milliseconds / 1000)
            self._tracer.start_span(name, context, attributes=attributes, start_time=at).end(until)
            at = until

    def flush(self) -> None:
        """Send what is left of spans, for a few seconds at most."""
        if isinstance(self._provider, TracerProvider):
            self._provider.force_flush(int(1000 * _FLUSH_SECONDS))

    def close(self) -> None:
        """The same for good; call it once the server has ended."""
        self.flush()
        if isinstance(self._provider, TracerProvider):
            self._provider.shutdown()


def _attributes(record: Record) -> Iterator[tuple[str, str | int | float | bool | list[str]]]:
    """Attributes of a request's span that are known when it is over."""
    yield "http.response.status_code", record.status
    if record.client is not None:
        yield "outrider.client", record.client
    asked, found = record.asked, record.found
    if asked is not None:
        yield "gen_ai.request.model", _plain(asked.model or "")
        yield "gen_ai.request.temperature", asked.temperature
        yield "gen_ai.request.top_p", asked.top_p
        yield "gen_ai.request.stream", asked.stream
        limit = asked.limit if isinstance(asked, ChatRequest) else asked.max_tokens
        for key, value, default in (
            ("gen_ai.request.max_tokens", limit, None),
            *((f"gen_ai.request.{name}", getattr(asked, name), OPTIONS[name].default) for name in _TRACED),
            ("gen_ai.request.choice.count", asked.n, 1),
        ):
            if value is not None and value != default:
                yield key, value
    if record.submitted is None:
        return
    if asked is not None:
        yield "gen_ai.response.model", asked.model or ""
    if record.answer_id is not None:
        yield "gen_ai.response.id", record.answer_id
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.new_tokens
    yield "gen_ai.usage.cache_read.input_tokens", sum(each.stats.reused_tokens for each in found)
    yield "gen_ai.response.finish_reasons", [str(reason) for reason in record.finish_reasons]
    if begun := [each for each in found if each.stats.new_tokens]:
        yield "gen_ai.response.time_to_first_chunk", min(map(record.first_token_seconds, begun))
    yield "outrider.drafter", record.drafter or "none"
    yield "outrider.drafted_tokens", sum(each.stats.drafted for each in found)
    yield "outrider.accepted_tokens", sum(each.stats.accepted for each in found)


def _plain(name: str) -> str:
    """What a client calls a model, as text that any collector takes."""
    return name[:_LONGEST].encode("utf-8", "backslashreplace").decode("utf-8")


def tracing_by_environment() -> Tracing:
    """Tracing as OpenTelemetry's environment variables set it up: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`,
    `OTEL_TRACES_SAMPLER`, `OTEL_PROPAGATORS` and others; `OTEL_TRACES_EXPORTER` is otlp, console or none.

    Raises RequestError for what cannot be exported to.
    """
    os.environ.setdefault("OTEL_SERVICE_NAME", "outrider")
    provider = TracerProvider()
    for exporter in _exporters():
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _exporters() -> Iterator[SpanExporter]:
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        match name.strip():
            case "otlp":
                yield _otlp()
            case "console":
                yield ConsoleSpanExporter()
            case "none" | "":
                pass
            case other:
                raise RequestError(f"OTEL_TRACES_EXPORTER is {other!r}; set it to otlp, console or none.")


def _otlp() -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable, "http/protobuf")
        if protocol != "http/protobuf":
            raise RequestError(
                f"{variable} is {protocol!r}; traces are sent by http/protobuf, to a collector's port 4318."
            )
    return OTLPSpanExporter()


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)
