"""A plan loaded for batches."""

from __future__ import annotations

from os import PathLike
from typing import TypedDict, Unpack

from outrider.plans.errors import RequestError
from outrider.runtime.exactness import Exactness
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.runtime import Runtime
from outrider.runtime.scheduler import SchedulerConfig

_QUEUE = 2**20  # requests: it is never full, as `Answering` bounds what is under way, in every thread


class LoadOptions(TypedDict, total=False):
    """Options of `load_for_batches`: `backend`, `threads`, `exactness` and `share_memory` (here True) as of
    `Runtime.load`; `max_running` requests at once (as many as the plan has branches); `prefix_cache`, None for none
    (`PrefixCacheConfig()`)."""

    backend: str | None
    threads: int
    exactness: Exactness
    share_memory: bool
    cuda_graphs: bool
    max_running: int | None
    prefix_cache: PrefixCacheConfig | None


def load_for_batches(plan: str | PathLike[str], **options: Unpack[LoadOptions]) -> Runtime:
    """Load a plan with a prefix cache, and a queue that is long enough. Raises what `Runtime.load` does."""
    if unknown := sorted(options.keys() - LoadOptions.__annotations__.keys()):
        raise RequestError(f"There is no option {unknown[0]!r}; choose from {', '.join(LoadOptions.__annotations__)}.")
    return Runtime.load(
        plan,
        backend=options.get("backend"),
        threads=options.get("threads", 0),
        cuda_graphs=options.get("cuda_graphs", True),
        prefix_cache=options.get("prefix_cache", PrefixCacheConfig()),
        scheduler=SchedulerConfig(options.get("max_running"), max_waiting=_QUEUE),
        exactness=options.get("exactness", "probed"),
        share_memory=options.get("share_memory", True),
    )
