"""The errors that a client gets, in OpenAI's shape."""

from __future__ import annotations

from plans.errors import BusyError, ClosedError, OutriderError, RequestError, UnavailableError
from runtime.server.answers import error_body


class ApiError(Exception):
    """The error that a client gets in place of an answer."""

    def __init__(self, status: int, message: str, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, code)


def told(error: OutriderError) -> ApiError:
    if isinstance(error, ClosedError):
        return shutting_down("the request was not begun")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), "rate_limit_error", "too_many_requests")
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "the plan's context is" in str(error) else None
        return ApiError(400, str(error), "invalid_request_error", code)
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error), "server_error", "unavailable")
    return ApiError(500, str(error), "server_error")


def shutting_down(what: str) -> ApiError:
    return ApiError(
        503, f"The server is shutting down: {what}. Send the request again later.", "server_error", "shutting_down"
    )
