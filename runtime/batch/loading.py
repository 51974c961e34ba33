"""A plan loaded for batches, and whether this machine may load it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from socket import gethostname
from typing import TypedDict, Unpack

from outrider.plans.errors import RequestError
from outrider.runtime.batch.folder import BatchState
from outrider.runtime.exactness import Exactness, foreign_kernels, kernels_that_count
from outrider.runtime.prefix_cache.cache import PrefixCacheConfig
from outrider.runtime.request_queue import SchedulerConfig
from outrider.runtime.runtime import Runtime

_QUEUE = 2**20  # requests: it is never full, as `Answering` bounds what is under way, in every thread


class LoadOptions(TypedDict, total=False):
    """Options of `load_for_batches`: `backend`, `threads`, `exactness` and `share_memory` (here True) as of
    `Runtime.load`; `max_running` requests at once (the number of the plan's branches); `prefix_cache`, None for none
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


def check_loaded(runtime: Runtime, plan: str | PathLike[str], state: BatchState) -> None:
    """Raise RequestError where the plan that was loaded, or this machine, would give other results than `state`."""
    if runtime.manifest.identity != state.plan:
        raise RequestError(
            f"{plan} is another plan on {gethostname()} than the batch was begun with; put that one there."
        )
    here = kernels_that_count(runtime.manifest, state.backend)
    if here and (foreign := foreign_kernels(here, state.kernels)):
        raise RequestError(
            f"{gethostname()} has {foreign}, and ONNX Runtime multiplies floats otherwise there, so that results "
            "could differ: use nodes of one kind, or a plan with weights of int8 or int4, the same bits everywhere."
        )


def check_visible(folder: Path, file: str) -> None:
    """Raise RequestError where this machine does not see a file that others have written, or read."""
    if not (folder / file).is_file():
        raise RequestError(
            f"{gethostname()} does not see {folder / file}; put it where every node of the cluster sees it "
            "under the same path, such as a shared file system, and pass that path."
        )
