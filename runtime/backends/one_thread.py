"""Calls that must all come from one thread, made by any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from weakref import finalize


class OneThread:
    """Runs calls in a thread of its own and waits for each. One caller at a time: they hold the device's lock."""

    def __init__(self) -> None:
        self._state = state = _State()
        threading.Thread(target=_serve, args=(state,), name="outrider-engines", daemon=True).start()
        finalize(self, _stop, state)

    def run(self, call: Callable[[], None]) -> None:
        """Raises what `call` does."""
        state = self._state
        state.call = call
        state.go.release()
        try:
            state.done.acquire()
        except BaseException:  # an interrupt: the call is on its way, and its end is awaited all the same
            state.done.acquire()
            raise
        error, state.error = state.error, None
        if error is not None:
            raise error


class _State:
    def __init__(self) -> None:
        self.go, self.done = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.done.acquire()
        self.call: Callable[[], None] | None = None
        self.error: BaseException | None = None


def _serve(state: _State) -> None:
    while True:
        state.go.acquire()
        call, state.call = state.call, None
        if call is None:
            return
        try:
            call()
        except BaseException as error:  # for the caller
            state.error = error
        del call
        state.done.release()


def _stop(state: _State) -> None:
    state.go.release()
