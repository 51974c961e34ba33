"""Plan to tokens: `Runtime.load(plan).generate(prompt)`. No PyTorch, no compiler.

What is named here is imported when it is asked for: `python -m runtime` imports this first, and must be able to end
quietly on Ctrl-C while the rest is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from plans.errors import BusyError, ClosedError, EmbedError, OutriderError, PlanError, RequestError

if TYPE_CHECKING:
    from runtime.beam_search import BeamResult
    from runtime.generation import FinishReason, Generation, Span, Stream
    from runtime.handle import Handle
    from runtime.memory import MemoryUse
    from runtime.prefix_cache.cache import PrefixCache, PrefixCacheConfig
    from runtime.prefix_cache.stats import PrefixCacheStats
    from runtime.request import Options
    from runtime.runtime import Runtime
    from runtime.scheduler import SchedulerConfig
    from runtime.scheduler_stats import SchedulerStats
    from runtime.session import Session
    from runtime.stats import Stats

_MODULES = {
    "beam_search": ("BeamResult",),
    "generation": ("FinishReason", "Generation", "Span", "Stream"),
    "handle": ("Handle",),
    "memory": ("MemoryUse",),
    "prefix_cache.cache": ("PrefixCache", "PrefixCacheConfig"),
    "prefix_cache.stats": ("PrefixCacheStats",),
    "request": ("Options",),
    "runtime": ("Runtime",),
    "scheduler": ("SchedulerConfig",),
    "scheduler_stats": ("SchedulerStats",),
    "session": ("Session",),
    "stats": ("Stats",),
}

__all__ = [
    "BeamResult",
    "BusyError",
    "ClosedError",
    "EmbedError",
    "FinishReason",
    "Generation",
    "Handle",
    "MemoryUse",
    "Options",
    "OutriderError",
    "PlanError",
    "PrefixCache",
    "PrefixCacheConfig",
    "PrefixCacheStats",
    "RequestError",
    "Runtime",
    "SchedulerConfig",
    "SchedulerStats",
    "Session",
    "Span",
    "Stats",
    "Stream",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            found: object = getattr(import_module(f"runtime.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
