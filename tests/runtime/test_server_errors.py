"""Errors in OpenAI's shape."""

from __future__ import annotations

import pytest

from outrider.plans.errors import BusyError, ClosedError, OutriderError, UnavailableError
from outrider.runtime.server.errors import as_api_error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BusyError("Too many wait."), 429, "too_many_requests"),
        (UnavailableError("No replica takes it."), 503, "unavailable"),
        (ClosedError("It is closed."), 503, "shutting_down"),
    ],
)
def test_what_passes_says_when_to_come_again(error: OutriderError, status: int, code: str) -> None:
    found = as_api_error(error)
    assert (found.status, found.body["error"]["code"]) == (status, code)
    assert int(found.headers["Retry-After"]) > 0
