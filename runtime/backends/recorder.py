"""Stretches of device work that are enqueued by one launch: recorded as CUDA graphs during a session's warm-up."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from outrider.runtime.backends.device_contract import Device

Call = Callable[[], None]


class Recorder:
    """Runs a stretch of calls that only enqueue: those of sizes that were recorded by one launch, all others plainly.

    While it is `recording`, it runs what it meets once plainly, which warms it up, and records it then. Addresses are
    fixed, and so are the sizes of a stretch: what is recorded is what would be enqueued again.
    """

    def __init__(self, device: Device) -> None:
        self.recording = False
        self._device = device
        self._graphs: dict[tuple[object, ...], Any] = {}

    def stretch(self, calls: Sequence[Call], sizes: Sequence[Sequence[int]]) -> Call:
        """One call for all of `calls`; `sizes` are the lists whose present values it runs with."""
        own = object()

        def run() -> None:
            key = (own, *(tuple(size) for size in sizes))
            if (graph := self._graphs.get(key)) is not None:
                self._device.replay(graph)
                return
            for call in calls:
                call()
            if self.recording:
                self._graphs[key] = self._record(calls)

        return run

    def clear(self) -> None:
        """Give all graphs back."""
        while self._graphs:
            self._device.discard(self._graphs.popitem()[1])

    def _record(self, calls: Sequence[Call]) -> Any:
        collects = gc.isenabled()
        gc.disable()  # a finaliser may enqueue: what a session leaves is kept
        try:
            self._device.begin_recording()
            try:
                for call in calls:
                    call()
            except BaseException:
                self._device.abort_recording()  # a stream that continues recording runs nothing
                raise
            return self._device.end_recording()
        finally:
            if collects:
                gc.enable()
