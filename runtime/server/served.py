"""What the server needs of that which generates: a runtime of this process has it, and so have replicas elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Protocol

from plans.manifest import Manifest
from plans.tokenizer import Tokenizer
from runtime.handle import Handle
from runtime.prefix_cache.cache import PrefixCache
from runtime.request import Options
from runtime.scheduler_stats import SchedulerStats
from runtime.text.grammars import Grammars


class Served(Protocol):
    """As `runtime.Runtime` has them, which is one."""

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
