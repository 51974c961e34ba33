"""An ahead-of-time compiled LLM engine: `from outrider import Runtime`, then `Runtime.load(plan).generate(prompt)`.

What is named here is imported when it is asked for: every command imports this first, and must be able to end quietly
on Ctrl-C while the rest is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from outrider.plans.errors import BusyError, ClosedError, EmbedError, OutriderError, PlanError, RequestError

if TYPE_CHECKING:
    __version__: str
    from outrider.runtime.beam_search import BeamResult
    from outrider.runtime.generation import FinishReason, Generation, Span, Stream
    from outrider.runtime.handle import Handle
    from outrider.runtime.memory import MemoryUse
    from outrider.runtime.options.options import Options
    from outrider.runtime.prefix_cache.cache import PrefixCache, PrefixCacheConfig
    from outrider.runtime.prefix_cache.stats import PrefixCacheStats
    from outrider.runtime.request_queue import SchedulerConfig
    from outrider.runtime.runtime import Runtime
    from outrider.runtime.scheduler_stats import SchedulerStats
    from outrider.runtime.session import Session
    from outrider.runtime.stats import Stats

_MODULES = {
    "beam_search": ("BeamResult",),
    "generation": ("FinishReason", "Generation", "Span", "Stream"),
    "handle": ("Handle",),
    "memory": ("MemoryUse",),
    "options.options": ("Options",),
    "prefix_cache.cache": ("PrefixCache", "PrefixCacheConfig"),
    "prefix_cache.stats": ("PrefixCacheStats",),
    "request_queue": ("SchedulerConfig",),
    "runtime": ("Runtime",),
    "scheduler_stats": ("SchedulerStats",),
    "session": ("Session",),
    "stats": ("Stats",),
}

__all__ = [
    "BeamResult", "BusyError", "ClosedError", "EmbedError", "FinishReason", "Generation", "Handle", "MemoryUse",
    "Options", "OutriderError", "PlanError", "PrefixCache", "PrefixCacheConfig", "PrefixCacheStats", "RequestError",
    "Runtime", "SchedulerConfig", "SchedulerStats", "Session", "Span", "Stats", "Stream",
]  # fmt: skip


if not TYPE_CHECKING:  # a checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        for module, names in _MODULES.items():
            if name in names:
                found = globals()[name] = getattr(import_module(f"outrider.runtime.{module}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
