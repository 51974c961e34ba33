"""One generation at a time: a session's lock."""

from __future__ import annotations

import threading

from outrider.plans.errors import BusyError


class Exclusive:
    """Holds a session's lock, and refuses instead of waiting: a second generation is a caller's mistake."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise BusyError("This session is generating already; finish or close that stream, or open another session.")

    def __exit__(self, *_: object) -> None:
        self._lock.release()
