"""A plan loaded for batches."""

from __future__ import annotations

from os import PathLike
from typing import TypedDict, Unpack

from runtime.batch.answering import MOST_WAITING
from runtime.exactness import Exactness
from runtime.prefix_cache.cache import PrefixCacheConfig
from runtime.runtime import Runtime
from runtime.scheduler import SchedulerConfig

CACHE_TOKENS, CACHE_BYTES = 65536, 2**30


class LoadOptions(TypedDict, total=False):
    """Options of `load_for_batches`: `backend`, `threads`, `exactness` and `share_memory` (here True) as of
    `Runtime.load`; `max_running` requests at once (as many as the plan has branches); a prefix cache of `cache_tokens`
    (65,536; 0 for none) and at most `cache_bytes` (1 GiB)."""

    backend: str | None
    threads: int
    exactness: Exactness
    share_memory: bool
    cuda_graphs: bool
    max_running: int | None
    cache_tokens: int
    cache_bytes: int


def load_for_batches(plan: str | PathLike[str], **options: Unpack[LoadOptions]) -> Runtime:
    """Load a plan with a prefix cache, and a queue that is long enough. Raises what `Runtime.load` does."""
    tokens, most = options.get("cache_tokens", CACHE_TOKENS), options.get("cache_bytes", CACHE_BYTES)
    return Runtime.load(
        plan,
        backend=options.get("backend"),
        threads=options.get("threads", 0),
        cuda_graphs=options.get("cuda_graphs", True),
        prefix_cache=PrefixCacheConfig(tokens, most) if tokens else None,
        scheduler=SchedulerConfig(options.get("max_running"), max_waiting=MOST_WAITING),
        exactness=options.get("exactness", "probed"),
        share_memory=options.get("share_memory", True),
    )
