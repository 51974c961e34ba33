"""The contract of a backend. The step loop knows nothing else about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from numpy.typing import DTypeLike

from outrider.plans.errors import RequestError
from outrider.plans.manifest import BackendPlan, Engine
from outrider.runtime.backends.shared_engines import SharedEngines
from outrider.runtime.execution.buffers import Buffers
from outrider.runtime.kv.memory import KvMemory

MAX_THREADS = 1024


def check_threads(threads: int) -> None:
    """Raise `RequestError` unless `threads` is a number of threads."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
        raise RequestError(
            f"threads is {threads!r}; pass a whole number from 0 (the backend chooses) to {MAX_THREADS}."
        )


class BoundEngine(Protocol):
    """An engine tied to one session's buffers. Calling it runs the leading part the sizes name."""

    def __call__(self, sizes: list[int]) -> None:
        """Run one step; `sizes` holds the current value of every symbol, in the order of `names.SYMBOLS`."""


class LoadedEngine(Protocol):
    """An engine's weights and code in memory, shared by all sessions; calls may come from any thread."""

    def bind(self, buffers: Buffers, bound: dict[str, str]) -> BoundEngine:
        """Tie every tensor of the engine to memory: `bound` names the buffer of each, by the engine's own names."""


@dataclass(frozen=True)
class Settings:
    """How a caller wants engines run: `threads` of a CPU, 0 for what the library chooses; on a GPU, whether what comes
    again is recorded as `cuda_graphs`; on the CPU, whether to `share_memory` with other processes, and the engines that
    they share (`shared_engines`)."""

    threads: int = 0
    cuda_graphs: bool = True
    share_memory: bool = False
    shared_engines: SharedEngines | None = None


class Backend(Protocol):
    """One backend."""

    def load(self, path: Path, engine: Engine) -> LoadedEngine:
        """Load the engine file at `path`. Raises `PlanError` when it cannot be loaded here."""

    def kv_memory(self, planes: int, heads: int, slots: int, size: int, dtype: DTypeLike) -> KvMemory:
        """Memory of zeros for KV that sessions share, where they have theirs. Raises `PlanError` for no memory."""

    def buffers(self, plan: BackendPlan) -> Buffers:
        """The buffers of a new session, where this backend's stages reach them. Raises `PlanError` for no memory."""


@dataclass(frozen=True)
class Driver:
    """How a backend is driven; its module has one as `DRIVER`.

    `reason` says why this machine cannot run a plan, or, given None, any plan; it returns None where it can.
    """

    reason: Callable[[BackendPlan | None], str | None]
    make: Callable[[BackendPlan, Settings], Backend]
