"""The errors that a client gets, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outrider.plans.errors import BusyError, ClosedError, OutriderError, RequestError, UnavailableError

_KEY = re.compile(r"[a-z_][\w.\[\]]*")  # with which a sentence on a key begins, unlike others
_BUSY_SECONDS = 1  # after which a queue, or a connection, is likely to have room
_RESTART_SECONDS = 5  # after which a server may be there again


class ApiError(Exception):
    """The error that a client gets in place of an answer: an HTTP status, OpenAI's `type` and `code`, and headers."""

    def __init__(
        self, status: int, message: str, kind: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code
        self.body, self.headers = _body(message, kind, code), dict(headers or {})


def as_api_error(error: Exception) -> ApiError:
    """The API error for an error of the runtime; of any other class, status 500."""
    if isinstance(error, ClosedError):
        return shutting_down("the request was not begun")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "rate_limit_error", "too_many_requests", _again(_BUSY_SECONDS))
    if isinstance(error, RequestError):
        return invalid(400, "context_length_exceeded" if "the plan's context is" in str(error) else None, str(error))
    if isinstance(error, UnavailableError):
        return _later(str(error), "unavailable")
    said = str(error) if isinstance(error, OutriderError) else f"It failed by a fault of ours: {error!r:.400}"
    return ApiError(500, said, "server_error", "server_error")


def failed(request_id: str) -> ApiError:
    """The error of a request that a fault of the server has ended, which is in its log."""
    message = f"The server failed to answer; its log says why, under {request_id}. Send the request again."
    return ApiError(500, message, "server_error", "server_error")


def shutting_down(what: str) -> ApiError:
    return _later(f"The server is shutting down: {what}. Send the request again later.", "shutting_down")


def loading(why: str) -> ApiError:
    how = "Send the request again later; /health/ready says when."
    return _later(f"The server does not serve yet: {why}. {how}", "loading")


def invalid(status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """The error of a request that is wrong."""
    return ApiError(status, message, "invalid_request_error", code, headers)


def client_gone() -> ApiError:
    """The error for the log alone: nobody is there to read it."""
    return invalid(499, "client_gone", "The client has gone.")


def too_many_connections(most: int) -> ApiError:
    message = f"Too many connections are open, and this server takes {most}; close idle ones, or try again later."
    headers = _again(_BUSY_SECONDS) | {"Connection": "close"}
    return ApiError(503, message, "rate_limit_error", "too_many_connections", headers)


def too_slow(part: str, seconds: float) -> ApiError:
    how = "send the request again, at once and whole."
    return invalid(408, "request_timeout", f"The request's {part} has not come within {seconds:g} s; {how}")


def not_http(status: int, why: str) -> ApiError:
    """The error for bytes that are no request of HTTP/1.1, with the status that the parser suggests."""
    if status == 431:
        how = "send fewer or shorter headers, or a shorter path."
        return invalid(431, "headers_too_large", f"The request's head is too large; {how}")
    message = f"The request is not HTTP/1.1 as this server reads it: {why}. Send a request line, headers and a body."
    return invalid(status, "invalid_http", message)


def _body(message: str, kind: str, code: str | None) -> dict[str, Any]:
    """As OpenAI's. Half a character, which a message may repeat of what was sent, is written as its escape."""
    escaped = message.encode("utf-8", "backslashreplace").decode("utf-8")
    key = _KEY.match(escaped)
    return {"error": {"message": escaped, "type": kind, "param": key and key.group(), "code": code}}


def _later(message: str, code: str) -> ApiError:
    return ApiError(503, message, "server_error", code, _again(_RESTART_SECONDS))


def _again(seconds: int) -> dict[str, str]:
    return {"Retry-After": str(seconds)}
