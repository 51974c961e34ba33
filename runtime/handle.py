"""A submitted request: its spans as they come, from any thread or event loop, and its result."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

from outrider.runtime.generation import Generation, Span

if TYPE_CHECKING:
    import asyncio


class Handle:
    """Iterate it, or `async for` it, for spans; `result()`, or `await` it, for the whole generation.

    Every iteration starts with the first span, also after an earlier one. An error that ended the request is raised
    after the last span.

    Cancelling a task that awaits or iterates it, or `asyncio.wait_for` on it, ends the request;
    `asyncio.shield` keeps it. Code that leaves an iteration in another way must call `cancel`.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        """`cancel` is called to end the request. Handles are made by `Runtime.submit`."""
        self._cancel = cancel
        self.submitted = perf_counter()  # in this process, in seconds
        self._spans: list[Span] = []
        self._result: Generation | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._at_end: list[Callable[[], None]] = []

    # What its scheduler calls.

    def push(self, span: Span) -> None:
        """Add a span."""
        with self._changed:
            self._spans.append(span)
            self._notify()

    def end(self, result: Generation | None, error: Exception | None = None) -> None:
        """End the request."""
        with self._changed:
            self._result, self._error = result, error
            self._notify()
            at_end, self._at_end = self._at_end, []
        for call in at_end:
            call()

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            with suppress(RuntimeError):  # an event loop that has been closed meanwhile
                listener()

    # What its owner calls.

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result is not None or self._error is not None

    @property
    def generation(self) -> Generation | None:
        """The whole generation, once the request has ended, but not with an error; waits for nothing."""
        return self._result

    def when_done(self, call: Callable[[], None]) -> None:
        """Have `call` called once the request has ended, in a thread of the runtime's, or now; it must not take long.

        To wait for many requests: `result` wakes its thread with every span.
        """
        with self._changed:
            if not self.done:
                self._at_end.append(call)
                return
        call()

    def cancel(self) -> None:
        """End the request at the next token boundary, or before it starts; what was committed is its result."""
        self._cancel()

    @property
    def error(self) -> Exception | None:
        """The error that ended the request, once one has."""
        return self._error

    def read(self, seen: int, timeout: float | None = None) -> tuple[list[Span], bool]:
        """Return the spans after the first `seen`, and whether the request is over.

        Waits for a span or the end, at most `timeout` seconds.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._spans) > seen or self.done, timeout)
            return self._spans[seen:], self.done

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when there are more spans, and at the end: at once, if some of it has come already.

        It runs in a thread of the runtime, which waits for it. Returns a function that ends the listening.
        """
        with self._changed:
            self._listeners.append(listener)
            if self._spans or self.done:
                listener()

        def end() -> None:
            with self._changed, suppress(ValueError):  # ended before
                self._listeners.remove(listener)

        return end

    def __iter__(self) -> Iterator[Span]:
        seen = 0
        while True:
            spans, done = self.read(seen)
            yield from spans
            seen += len(spans)
            if done:
                break
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._error is not None else "done"
        return f"<Handle of a request, {len(self._spans)} spans, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Handle belongs to a thread of its process; pass on its `result()`.")

    def result(self, timeout: float | None = None) -> Generation:
        """The whole generation. Raises the error that ended it, and TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"The request is not over after {timeout} s; wait longer, or cancel it.")
        return self._ended()

    def _ended(self) -> Generation:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    async def __aiter__(self) -> AsyncIterator[Span]:
        import asyncio  # which those who await nothing do without

        loop, changed, seen, task = asyncio.get_running_loop(), asyncio.Event(), 0, asyncio.current_task()
        end = self.listen(lambda: _wake(loop, changed))
        try:
            while True:
                changed.clear()
                with self._changed:
                    spans, done = self._spans[seen:], self.done
                for span in spans:
                    yield span
                seen += len(spans)
                if done:
                    break
                await changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except GeneratorExit:
            if task is not None and (task.cancelled() or task.cancelling()):  # between two spans
                self.cancel()
            raise
        finally:
            end()
        if self._error is not None:
            raise self._error

    def __await__(self) -> Generator[object, None, Generation]:
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        async for _ in self:
            pass
        return self._ended()


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    loop.call_soon_threadsafe(changed.set)
