"""`/metrics` in Prometheus' format, from the counts that scheduler and prefix cache keep anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from outrider.runtime.generation import FinishReason
from outrider.runtime.server.gateway_metrics import GatewayCounts, GatewayHistograms
from outrider.runtime.server.record import Record
from outrider.runtime.server.served import ServedRuntime

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """A registry of its own, so that several servers in one process do not meet; all it tells has the `labels`."""

    def __init__(self, runtime: ServedRuntime, model: str, labels: Mapping[str, str] | None = None) -> None:
        self._labels = labels or {}
        self.registry = CollectorRegistry()
        self.registry.register(_Counts(runtime))
        self.registry.register(GatewayCounts(runtime, model))
        self._gateway = GatewayHistograms(model, self.registry)
        self.ttft = Histogram(
            "outrider_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "outrider_request_seconds",
            "From a request's arrival to its end",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client.generate_latest`."""
        for metric in self.registry.collect():
            metric.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples]
            yield metric

    def observe(self, record: Record) -> None:
        """Take in a request that is over."""
        self._gateway.observe(record)
        begun = [found for found in record.found if found.stats.new_tokens]
        for found in begun:
            self.ttft.observe(record.first_token_seconds(found))
        if begun and record.error is None and FinishReason.CANCELLED not in record.finish_reasons:
            self.duration.observe(record.seconds)


class _Counts(Collector):
    def __init__(self, runtime: ServedRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        stats = self._runtime.scheduler_stats
        for name, what, value in (
            ("requests_waiting", "Requests that have not begun", stats.waiting),
            ("requests_running", "Requests that share the passes now", stats.running),
            ("tokens_per_verify", "New tokens / passes, of all requests that a pass served", stats.tokens_per_verify),
            ("kv_slots", "Slots of the target's KV cache", stats.kv_slots),
            ("kv_usage_ratio", "Of those, the share that running requests have", stats.kv_usage),
            ("kv_reserved_ratio", "Of those, the share that they may come to have", stats.kv_reservation),
            ("longest_step_seconds", "The longest pass so far, and what belongs to it", stats.longest_round_ms / 1000),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", what, value)
        for name, what, value in (
            ("requests_submitted", "Requests that were taken", stats.submitted),
            ("requests_refused", "Requests that were not taken, as too many waited", stats.refused),
            ("requests_finished", "Requests that are over", stats.finished),
            ("requests_failed", "Requests that an error ended", stats.failed),
            ("prompt_tokens", "Tokens of prompts that began", stats.prompt_tokens),
            ("reused_tokens", "Of those, tokens that were not computed again", stats.reused_tokens),
            ("new_tokens", "Tokens that were generated", stats.new_tokens),
            ("drafted_tokens", "Tokens that were drafted and verified", stats.drafted),
            ("accepted_tokens", "Of those, tokens that were accepted", stats.accepted),
            ("draft_rounds", "Rounds in which the target verified a draft", stats.draft_rounds),
            ("queued_seconds", "Seconds that requests waited before they began", stats.queued_ms / 1000),
        ):
            yield CounterMetricFamily(f"outrider_{name}", what, value)
        yield SummaryMetricFamily(
            "outrider_step_seconds",
            "Passes, and what belongs to them",
            count_value=stats.rounds,
            sum_value=stats.busy_ms / 1000,
        )
        cache = self._runtime.prefix_cache
        if cache is None:
            return
        kept = cache.get_stats()
        for name, what, value in (
            ("cache_tokens", "Tokens that the prefix cache holds", cache.get_cached_tokens()),
            ("cache_usage_ratio", "Of what it may hold", cache.get_usage_ratio()),
            ("cache_hit_rate", "Hits / requests", kept.hit_rate),
            ("cache_reuse_rate", "Tokens not computed again / tokens of all requests", kept.reuse_rate),
        ):
            yield GaugeMetricFamily(f"outrider_{name}", what, value)
        for name, what, value in (
            ("cache_requests", "Sequences that were looked up", kept.total_requests),
            ("cache_hits", "Of those, found", kept.cache_hits),
            ("cache_evictions", "Times that something was given up", kept.eviction_count),
            ("cache_evicted_tokens", "Tokens that were given up", kept.tokens_evicted),
        ):
            yield CounterMetricFamily(f"outrider_{name}", what, value)
