"""Notifications of submitted requests, in one thread of their own: no pass waits for a program that is told of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable

_LOG = logging.getLogger("outrider")


class Notifier:
    """Calls a function for each key that has news. Safe to use from several threads, and from the functions.

    A key that is told again before its function was called is called for once. The thread starts with the first news.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._functions: dict[Hashable, Callable[[], None]] = {}
        self._news: deque[Hashable] = deque()
        self._told: Hashable | None = None  # whose function runs
        self._thread: threading.Thread | None = None

    def add(self, key: Hashable, function: Callable[[], None]) -> None:
        """Have `function` called when `key` has news."""
        with self._changed:
            self._functions[key] = function

    def tell(self, key: Hashable) -> None:
        """Say that `key` has news; does nothing for one that was removed."""
        with self._changed:
            if key not in self._functions or key in self._news:
                return
            self._news.append(key)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="outrider-notifier", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, key: Hashable) -> None:
        """Call the key's function no more; wait for one that runs, unless this is called from it."""
        with self._changed:
            self._functions.pop(key, None)
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: self._told != key)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._told = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._news)
                key = self._news.popleft()
                function = self._functions.get(key)
                if function is None:
                    continue
                self._told = key
            try:
                function()
            except Exception:
                _LOG.exception("a notification failed")
