"""What the server needs of that which generates: a runtime of this process has it, and so have replicas elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Protocol

from outrider.plans.manifest import Manifest
from outrider.plans.tokenizer import Tokenizer
from outrider.runtime.handle import Handle
from outrider.runtime.options.options import Options
from outrider.runtime.prefix_cache.cache import PrefixCache
from outrider.runtime.scheduler_stats import SchedulerStats
from outrider.runtime.text.grammars import Grammars

CUTTING_SECONDS = 5.0
"""For requests to hear that they are cut off, at the end of their pass."""


class ServedRuntime(Protocol):
    """The part of `runtime.Runtime` that the server uses. `ray_serve.RemoteRuntime` offers the same without weights."""

    tokenizer: Tokenizer
    grammars: Grammars
    prefix_cache: PrefixCache | None

    @property
    def manifest(self) -> Manifest: ...

    @property
    def scheduler_stats(self) -> SchedulerStats: ...

    def submit_all(
        self,
        asked: Sequence[tuple[str | Sequence[int], Options]],
        *,
        priority: int = 0,
        deadline: float | None = None,
        client: str | None = None,
    ) -> list[Handle]: ...

    def save_prefix_cache(self, path: str | PathLike[str]) -> int: ...

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool: ...


def drain(served: ServedRuntime, seconds: float) -> bool:
    """Finish requests for at most `seconds`, then cancel those that still run. Returns whether all were finished."""
    if served.close(timeout=seconds):
        return True
    served.close(drain=False, timeout=CUTTING_SECONDS)
    return False
