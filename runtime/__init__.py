"""Plan to tokens: `Runtime.load(plan).generate(prompt)`. No PyTorch, no compiler."""

from runtime.beam_search import BeamResult
from runtime.branch_stream import BranchSpan, BranchStats, BranchStream
from runtime.generation import FinishReason, Generation, GenerationStream, Span
from runtime.handle import Handle
from runtime.prefix_cache import PrefixCache, PrefixCacheConfig
from runtime.prefix_stats import PrefixCacheStats
from runtime.runtime import Runtime
from runtime.scheduler import SchedulerConfig
from runtime.scheduler_stats import SchedulerStats
from runtime.session import Session
from runtime.stats import Stats

__all__ = [
    "BeamResult",
    "BranchSpan",
    "BranchStats",
    "BranchStream",
    "FinishReason",
    "Generation",
    "GenerationStream",
    "Handle",
    "PrefixCache",
    "PrefixCacheConfig",
    "PrefixCacheStats",
    "Runtime",
    "SchedulerConfig",
    "SchedulerStats",
    "Session",
    "Span",
    "Stats",
]
