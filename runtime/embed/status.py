"""Errors of Python as C has them: a status and a sentence."""

from __future__ import annotations

from enum import IntEnum

from outrider.plans.errors import BusyError, ClosedError, OutriderError, RequestError
from outrider.runtime.embed.handles import CallbackError, InvalidArgumentError, InvalidHandleError, QueueFullError


class Status(IntEnum):
    """`outrider_status`."""

    OK = 0
    INVALID_HANDLE = 1
    INVALID_ARGUMENT = 2
    REQUEST = 3
    PLAN = 4
    BUSY = 5
    ENVIRONMENT = 6
    NO_MEMORY = 7
    CALLBACK = 8  # of a callback of outrider_generate, the library itself gives it
    INTERNAL = 9
    TIMEOUT = 10
    CLOSED = 11
    FULL = 12


_STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidHandleError, Status.INVALID_HANDLE),
    (InvalidArgumentError, Status.INVALID_ARGUMENT),
    (CallbackError, Status.CALLBACK),
    (TimeoutError, Status.TIMEOUT),
    (QueueFullError, Status.FULL),
    (ClosedError, Status.CLOSED),
    (BusyError, Status.BUSY),
    (RequestError, Status.REQUEST),
    (OutriderError, Status.PLAN),
    (MemoryError, Status.NO_MEMORY),
    (ImportError, Status.ENVIRONMENT),
)


def describe_error(error: BaseException) -> tuple[Status, str]:
    """The status of an error, and what `outrider_last_error` says of it."""
    if isinstance(error.__cause__, CallbackError):  # of a function of logits, which the request ends with
        error = error.__cause__
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), Status.INTERNAL)
    said = str(error) or type(error).__name__
    texts = {
        Status.NO_MEMORY: "there is not enough memory for this",
        Status.ENVIRONMENT: f"Outrider's environment is incomplete ({error}); copy or install it whole again",
        Status.INTERNAL: f"a fault of Outrider's own, please report it: {type(error).__name__}: {error}",
    }
    return status, texts.get(status, said)
