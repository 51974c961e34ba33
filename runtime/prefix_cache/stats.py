"""Counters of a prefix cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class PrefixCacheStats:
    """Counts since the cache was made."""

    total_requests: int = 0
    cache_hits: int = 0
    total_tokens_processed: int = 0  # of all requests
    tokens_matched: int = 0  # that were found
    tokens_reused: int = 0  # that were not computed again: one of each request always is
    eviction_count: int = 0
    tokens_evicted: int = 0
    tokens_inserted: int = 0
    inserts_refused: int = 0  # for want of pages that nobody uses
    match_ms: float = 0.0  # looking up
    read_ms: float = 0.0  # copying KV to where a sequence has it
    insert_ms: float = 0.0  # keeping KV, evicting included

    @property
    def cache_misses(self) -> int:
        return self.total_requests - self.cache_hits

    @property
    def tokens_computed(self) -> int:
        return self.total_tokens_processed - self.tokens_reused

    @property
    def hit_rate(self) -> float:
        """Hits / requests; 0 before there was one."""
        return self.cache_hits / self.total_requests if self.total_requests else 0.0

    @property
    def match_rate(self) -> float:
        """Matched / processed tokens."""
        return self.tokens_matched / self.total_tokens_processed if self.total_tokens_processed else 0.0

    @property
    def reuse_rate(self) -> float:
        """Reused / processed tokens."""
        return self.tokens_reused / self.total_tokens_processed if self.total_tokens_processed else 0.0

    def to_json(self) -> dict[str, object]:
        """All counts and rates, with stable keys."""
        return asdict(self) | {
            name: getattr(self, name)
            for name in ("cache_misses", "tokens_computed", "hit_rate", "match_rate", "reuse_rate")
        }
