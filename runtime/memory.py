"""Memory that a runtime holds beside its weights, in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from outrider.plans.check import kv_bytes, session_bytes
from outrider.plans.manifest import BackendPlan
from outrider.runtime.step_loop_pool import StepLoopPool


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a runtime: `engines` sets of buffers of `engine_bytes` each, of which `idle` are lent to nobody.

    Every open session has one, and so has every generation that runs. `kv_bytes` is the part of a set that is the KV
    cache of each model. `scratch_bytes` are on a GPU, of all sets: what kernels leave for each other.
    `ngram_memory_bytes` are those of n-gram drafters' memories of outputs. Buffers are zero at first: systems that hand
    out such pages lazily count less.
    """

    engines: int
    idle: int
    engine_bytes: int
    prefix_cache_bytes: int
    kv_bytes: dict[str, int] = field(default_factory=dict)
    ngram_memory_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        held = self.engines * self.engine_bytes + self.scratch_bytes
        return held + self.prefix_cache_bytes + self.ngram_memory_bytes

    def to_json(self) -> dict[str, object]:
        """All fields and the total, with stable keys."""
        return asdict(self) | {"total_bytes": self.total_bytes}


def memory_use(plan: BackendPlan, pool: StepLoopPool) -> MemoryUse:
    """Count what is held now."""
    return MemoryUse(
        engines=len(pool.loops),
        idle=len(pool.idle),
        engine_bytes=session_bytes(plan),
        prefix_cache_bytes=0 if pool.cache is None else pool.cache.nbytes,
        kv_bytes=kv_bytes(plan),
        ngram_memory_bytes=sum(memory.nbytes for memory in pool.loaded.memories.values()),
        scratch_bytes=sum(engine.buffers.scratch_bytes for engine in pool.loops),
    )
