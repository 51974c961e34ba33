"""What runs for C: sessions that end, submitted requests with what was not read yet, notifications, and functions of
logits."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.plans.errors import BusyError
from outrider.runtime.embed.c_memory import CMemory, Struct
from outrider.runtime.embed.handles import CallbackError, InvalidHandleError
from outrider.runtime.embed.options import OnLogits
from outrider.runtime.generation import Generation, Span
from outrider.runtime.handle import Handle
from outrider.runtime.session import Session

MOST_SAID = 512  # bytes of what an exception of the program's says
_LOG = logging.getLogger("outrider")


def seconds(milliseconds: int) -> float | None:
    """A timeout as Python has it: None for one below 0."""
    return None if milliseconds < 0 else min(milliseconds / 1000, threading.TIMEOUT_MAX)


@dataclass
class OpenSession:
    """A session and the flag that ends its generation, while there is one."""

    session: Session
    cancel: threading.Event | None = None
    thread: int | None = None  # that generates
    _busy: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def generating(self) -> Iterator[threading.Event]:
        if not self._busy.acquire(blocking=False):
            raise BusyError("This session is generating already; wait for that call, or create another session.")
        try:
            self.cancel, self.thread = threading.Event(), threading.get_ident()
            yield self.cancel
        finally:
            self.cancel = self.thread = None
            self._busy.release()

    def end(self) -> None:
        """End its generation at the next token, if there is one."""
        if (cancel := self.cancel) is not None:
            cancel.set()

    def wait(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of its generation, unless this is called from its callback."""
        if self.thread != threading.get_ident() and self._busy.acquire(timeout=timeout):
            self._busy.release()


class Notifier:
    """Calls a function for each key that has news, in one thread: no pass waits for a program.

    Safe to use from several threads, and from the functions.
    A key that is notified again before its function was called is called once. The thread starts with the first news.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._functions: dict[Hashable, Callable[[], None]] = {}
        self._news: deque[Hashable] = deque()
        self._running: Hashable | None = None  # whose function runs
        self._thread: threading.Thread | None = None

    def add(self, key: Hashable, function: Callable[[], None]) -> None:
        """Have `function` called when `key` has news."""
        with self._changed:
            self._functions[key] = function

    def notify(self, key: Hashable) -> None:
        """Call the function of `key`, unless it was removed."""
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
                self._changed.wait_for(lambda: self._running != key)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._news)
                key = self._news.popleft()
                function = self._functions.get(key)
                if function is None:
                    continue
                self._running = key
            try:
                function()
            except Exception:
                _LOG.exception("a notification failed")


class ProgramFunctions:
    """Calls functions of the program's, each by a `call` of the library's. They raise CallbackError."""

    def __init__(self, ffi: Any) -> None:
        self._ffi, self._memory = ffi, CMemory(ffi)

    def change_logits(
        self, call: Any, function: Any, user: Any, tokens: list[int], logits: NDArray[np.float32]
    ) -> None:
        said, row = self._ffi.new("char[]", MOST_SAID), self._ffi.from_buffer("float[]", logits, require_writable=True)
        returned = call(function, user, self._memory.ids(tokens), len(tokens), row, len(logits), said, MOST_SAID)
        self._check(said, "the function of logits")
        if returned:
            raise CallbackError(f"the function of logits gave up: it returned {returned}")

    def notify(self, call: Any, function: Any, user: Any, number: int) -> None:
        said = self._ffi.new("char[]", MOST_SAID)
        call(function, user, number, said, MOST_SAID)
        self._check(said, "the notification")

    def _check(self, said: Any, who: str) -> None:
        if text := self._ffi.string(said).decode("utf-8", "replace"):
            raise CallbackError(f"{who} threw an exception, {text}; it must return")


class Functions:
    """Functions of logits of one submitted request, which the thread that runs the passes calls."""

    def __init__(self) -> None:
        self._running = threading.RLock()
        self._ended = False

    def until_the_end(self, function: OnLogits) -> OnLogits:
        """Return the function as it is to be called: it does nothing after `end`."""

        def call(tokens: list[int], logits: NDArray[np.float32]) -> None:
            with self._running:
                if not self._ended:
                    function(tokens, logits)

        return call

    def end(self) -> None:
        """Call them no more; wait for one that runs, unless this is called from it."""
        with self._running:
            self._ended = True


class OpenRequest:
    """A handle of the runtime's, how far C has read it, and all spans that C was given."""

    def __init__(self, handle: Handle, functions: Functions, memory: CMemory, notifier: Notifier) -> None:
        self._handle, self._functions, self._memory, self._notifier = handle, functions, memory, notifier
        self._reading = threading.Lock()
        self._read = 0  # spans
        self._given: list[Struct] = []
        self._end: Struct | None = None  # what is read after the last token
        self._failure: CallbackError | None = None  # of the notification
        self._destroyed = False
        self._stop_listening: Callable[[], None] = lambda: None

    def notify(self, call: Callable[[], None]) -> None:
        """Have `call` called by the notifier when there is something to read. It raises CallbackError."""
        self._notifier.add(self, lambda: self._call(call))
        self._stop_listening = self._handle.listen(lambda: self._notifier.notify(self))

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except CallbackError as error:
            self._failure = error
            self._notifier.remove(self)
            self.cancel()

    def next(self, timeout: float | None) -> Any:
        """The `outrider_span` of all that has come since the last call. Raises TimeoutError, and what ended it."""
        until = None if timeout is None else monotonic() + timeout
        if not self._reading.acquire(timeout=-1 if timeout is None else timeout):
            raise _late(timeout)
        try:
            left = None if until is None else max(0.0, until - monotonic())
            spans, done = self._handle.read(self._read, left)
            if self._destroyed:  # by another thread: what would be given is not kept
                raise InvalidHandleError("the request was destroyed while this call waited for it")
            if not spans and not done:
                raise _late(timeout)
            if not spans:
                return self._last().struct
            self._read += len(spans)
            made = self._struct(spans, over=done and self._error is None)
            self._given.append(made)
            return made.struct
        finally:
            self._reading.release()

    def _last(self) -> Struct:
        """The span after the last token, or the error that ended the request."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # which would grow with every call
        if self._end is None:
            self._end = self._struct([], over=True)
        return self._end

    def _struct(self, spans: list[Span], over: bool) -> Struct:
        ids = list(chain.from_iterable(span.token_ids for span in spans))
        logprobs = list(chain.from_iterable(span.logprobs for span in spans))
        return self._memory.span(ids, "".join(span.text for span in spans), logprobs, over)

    def result(self, timeout: float | None) -> Generation:
        """The whole generation. Raises TimeoutError, and what ended it."""
        try:
            made = self._handle.result(timeout)
        except TimeoutError:
            raise _late(timeout) from None
        if self._failure is not None:
            raise self._failure
        return made

    @property
    def _error(self) -> Exception | None:
        return self._failure or self._handle.error

    def cancel(self) -> None:
        self._handle.cancel()

    def destroy(self) -> None:
        """End it, and wait for a function of the program's that runs in another thread."""
        self._destroyed = True
        self.cancel()
        self._stop_listening()
        self._notifier.remove(self)
        self._functions.end()


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"nothing has come of the request in {timeout} s; call again, or cancel it")
