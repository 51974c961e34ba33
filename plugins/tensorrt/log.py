"""TensorRT's messages, kept for the texts of errors."""

from __future__ import annotations

from typing import Any, Protocol


class Log(Protocol):
    """The methods of a logger of `make_log`, beside TensorRT's own."""

    def clear(self) -> None: ...

    def said(self) -> str: ...


def make_log(trt: Any) -> Any:
    """Make a logger that keeps errors, for the texts of exceptions, and prints nothing."""

    class Kept(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self._errors.append(" ".join(message.split()))

        def clear(self) -> None:
            self._errors.clear()

        def said(self) -> str:
            return "; ".join(self._errors) or "it gives no reason"

    return Kept()
