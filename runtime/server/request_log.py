"""One line for each request, as text or JSON, and other messages of the server in the same format.

A line holds what an operator counts and searches, and nothing that a client has written but its request's id, the path
and the model's name, in characters that cannot end a line. Messages of errors that clients cause are left out, as they
repeat parts of bodies.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType

from outrider.runtime.server.config import LogFormat
from outrider.runtime.server.errors import ApiError
from outrider.runtime.server.record import Record

_LOG = logging.getLogger("outrider.requests")
_LONGEST = 200  # characters of a path, or of a model's name


def log_request(record: Record) -> None:
    """Write the request's line: as an error where the server is to blame, and for debugging of probes that succeed."""
    failed = record.error is not None and record.error.code == "server_error"
    probe = record.path == "/metrics" or record.path.startswith("/health")  # every few seconds, and of no interest
    level = logging.DEBUG if probe and record.status == 200 else logging.INFO
    if record.fault is not None or failed:
        level = logging.ERROR
    about = None if record.fault is None else _about(record.fault)
    _LOG.log(level, "request", exc_info=about, extra={"fields": fields(record)})


def log_fault(record: Record) -> None:
    """Write a line where the server has a fault, for servers without a line of every request."""
    if (fault := record.fault) is not None:
        _LOG.error("request %s of %s failed", record.request_id, record.path[:_LONGEST], exc_info=_about(fault))


def _about(fault: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    """Where an exception was raised, and its kind, for any formatter: its message may repeat what was worked on."""
    kind = type(fault)
    bare: type[Exception] = type(kind.__name__, (Exception,), {"__module__": kind.__module__})
    return bare, bare(), fault.__traceback__


def log_refusal(request_id: str, error: ApiError) -> None:
    """Write the line of a request that was refused before the application heard of it."""
    said = {"status": error.status, "request_id": request_id, "error_type": error.kind, "error_code": error.code}
    _LOG.info("request", extra={"fields": said})


def fields(record: Record) -> dict[str, object]:
    """What is said of a request, by stable keys; what does not apply to it is left out."""
    said: dict[str, object] = {
        "method": record.method,
        "path": record.path[:_LONGEST],
        "status": record.status,
        "request_id": record.request_id,
        "total_ms": round(1000 * record.seconds, 3),
    }
    if record.client is not None:
        said["client"] = record.client
    if record.asked is not None:
        said |= {"model": (record.asked.model or "")[:_LONGEST], "stream": record.asked.stream}
    if record.submitted is not None:
        said |= _generated(record)
    if record.error is not None:
        said |= {"error_type": record.error.kind, "error_code": record.error.code}
        if record.error.status >= 500:
            said["error"] = str(record.error)
    if record.span is not None:
        said["trace_id"] = f"{record.span.get_span_context().trace_id:032x}"
    return said


def _generated(record: Record) -> dict[str, object]:
    """Of several choices, times are those of the first that began, and counts are sums."""
    found = record.found
    said: dict[str, object] = {
        "prompt_tokens": record.prompt_tokens,
        "reused_tokens": sum(each.stats.reused_tokens for each in found),
        "new_tokens": record.new_tokens,
        "choices": len(record.handles),
        "drafter": record.drafter,
        "drafted": sum(each.stats.drafted for each in found),
        "accepted": sum(each.stats.accepted for each in found),
        "finish_reason": ",".join(sorted(set(record.finish_reasons))) or "error",
    }
    if found:
        said["queue_ms"] = round(1000 * min(map(record.queue_seconds, found)), 3)
    if begun := [each for each in found if each.stats.new_tokens]:
        said["ttft_ms"] = round(1000 * min(map(record.first_token_seconds, begun)), 3)
    return said


def log_to_stderr(form: LogFormat) -> None:
    """Have the server's loggers write to standard error in this format, requests included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    for name in ("outrider", "uvicorn.error", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("outrider").setLevel(logging.INFO)


class _Json(logging.Formatter):
    """An object a line; those of requests have `"event": "request"`, others `"event": "message"`."""

    def format(self, record: logging.LogRecord) -> str:
        own: Mapping[str, object] | None = getattr(record, "fields", None)
        said: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        said |= {"event": "message", "message": record.getMessage()} if own is None else {"event": "request", **own}
        if record.exc_info:
            said["exception"] = _exception(record)
        return json.dumps(said)


class _Text(logging.Formatter):
    """`time level message`, or `time level request key=value ...`, values as in JSON where they are no plain words."""

    def format(self, record: logging.LogRecord) -> str:
        own: Mapping[str, object] | None = getattr(record, "fields", None)
        pairs = "" if own is None else "".join(f" {key}={_plain(value)}" for key, value in own.items())
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}{pairs}"
        return f"{line}\n{_exception(record)}" if record.exc_info else line


def _exception(record: logging.LogRecord) -> str:
    """Where an exception was raised, and its kind: other loggers' have messages that may repeat bodies."""
    kind, _, trace = record.exc_info or (None, None, None)
    return "".join(traceback.format_tb(trace)) + (kind.__name__ if kind is not None else "")


def _plain(value: object) -> str:
    word = isinstance(value, str) and value.isascii() and value.isprintable() and value and not {*' "='} & {*value}
    return str(value) if word else json.dumps(value)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
