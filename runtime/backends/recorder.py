"""Stretches of device work that are enqueued by one launch: recorded as CUDA graphs when a step's sizes come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Call = Callable[[], None]
MOST = 256  # graphs that are kept; of more, those that were used least recently go


class Recording(Protocol):
    """What a device can record (`cuda_driver.CudaDevice`)."""

    def begin_recording(self) -> None: ...

    def end_recording(self) -> Any: ...

    def replay(self, graph: Any) -> None: ...

    def discard(self, graph: Any) -> None: ...


class Recorder:
    """Runs a stretch of calls that only enqueue: plainly the first time its sizes are met, which warms it up, recorded
    the second, and from then on by one launch.

    Addresses are fixed, and so are the sizes of a stretch: what is recorded is what would be enqueued again.
    """

    def __init__(self, device: Recording) -> None:
        self._device = device
        self._graphs: OrderedDict[tuple[object, ...], Any] = OrderedDict()  # None: met once

    def stretch(self, calls: Sequence[Call], sizes: Sequence[Sequence[int]]) -> Call:
        """One call for all of `calls`; `sizes` are the lists whose present values it runs with."""
        own = object()

        def run() -> None:
            key = (own, *(tuple(size) for size in sizes))
            graph = self._graphs.get(key)
            if graph is not None:
                self._graphs.move_to_end(key)
                self._device.replay(graph)
            elif key in self._graphs:
                self._graphs[key] = self._record(calls)
                self._device.replay(self._graphs[key])
            else:
                self._graphs[key] = None
                for call in calls:
                    call()
                while len(self._graphs) > MOST:
                    self._discard(self._graphs.popitem(last=False)[1])

        return run

    def clear(self) -> None:
        """Give all graphs back."""
        while self._graphs:
            self._discard(self._graphs.popitem()[1])

    def _discard(self, graph: Any) -> None:
        if graph is not None:
            self._device.discard(graph)

    def _record(self, calls: Sequence[Call]) -> Any:
        self._device.begin_recording()
        try:
            for call in calls:
                call()
        except BaseException:
            self._device.discard(self._device.end_recording())  # a stream that goes on recording runs nothing
            raise
        return self._device.end_recording()
