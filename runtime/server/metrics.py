"""`/metrics` in Prometheus' format, from counts of scheduler and prefix cache, under our names and vLLM's.

Names, types and meanings of the latter are those of vLLM 0.32 (its page "Production Metrics"), and of the protocol
between the Gateway API's endpoint picker and model servers. `metrics.md` has a table of both, and where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from outrider.runtime.generation import FinishReason
from outrider.runtime.prefix_cache.page_pool import PAGE
from outrider.runtime.server.record import Record
from outrider.runtime.server.served import ServedRuntime

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics(Collector):
    """A registry of its own, so that several servers in one process do not meet; all its metrics have the `labels`."""

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
            "outrider_request_seconds", "From a request's arrival to its end", buckets=_SECONDS, registry=self.registry
        )

    def collect(self) -> Iterator[Metric]:
        """For `prometheus_client.generate_latest`."""
        for metric in self.registry.collect():
            metric.samples = [sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples]
            yield metric

    def observe(self, record: Record) -> None:
        """Count a request that is over."""
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
            ("cache_evictions", "Times that something was evicted", kept.eviction_count),
            ("cache_evicted_tokens", "Tokens that were evicted", kept.tokens_evicted),
        ):
            yield CounterMetricFamily(f"outrider_{name}", what, value)


_LABELS = ("model_name", "engine")
_ENGINE = "0"  # vLLM numbers a server's engines; this one has one queue
# vLLM's bounds, all of them, as rules ask for buckets by their bounds; of times per token some shorter ones as well.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
          20.0, 40.0, 80.0)  # fmt: skip
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.DEADLINE: "length",
    FinishReason.CANCELLED: "abort",
}


class GatewayHistograms:
    """What is observed of each choice of a request that is over, and counts of why they ended."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        self._labels = (model, _ENGINE)
        self._registry = registry
        self._first_token = self._histogram("time_to_first_token_seconds", "Time to first token", _TTFT)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens after the first span", _TOKEN
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "From arrival to the end", _LATENCY)
        self._queue = self._histogram("request_queue_time_seconds", "Time in the queue", _LATENCY)
        self._prefill = self._histogram("request_prefill_time_seconds", "Time to compute the prompt", _LATENCY)
        self._decode = self._histogram("request_decode_time_seconds", "Time from the first token to the last", _LATENCY)
        self._inference = self._histogram("request_inference_time_seconds", "Time that it ran", _LATENCY)
        self._ended = Counter(
            "vllm:request_success", "Choices that are over", (*_LABELS, "finished_reason"), registry=registry
        )
        for reason in sorted({*_REASONS.values(), "error"}):
            self._ended.labels(*self._labels, reason)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"vllm:{name}", what, _LABELS, buckets=buckets, registry=self._registry)
        return made.labels(*self._labels)

    def observe(self, record: Record) -> None:
        failed = len(record.handles) - len(record.found)
        self._ended.labels(*self._labels, "error").inc(failed)
        for found in record.found:
            stats, cut = found.stats, found.finish_reason is FinishReason.CANCELLED
            self._ended.labels(*self._labels, _REASONS[found.finish_reason]).inc()
            self._queue.observe(stats.queued_ms / 1000)
            if stats.new_tokens:
                self._first_token.observe(record.first_token_seconds(found))
                self._prefill.observe(stats.ttft_ms / 1000)
            if cut or not stats.new_tokens:
                continue
            self._latency.observe(record.queue_seconds(found) + stats.total_ms / 1000)
            self._inference.observe(stats.total_ms / 1000)
            self._decode.observe((stats.total_ms - stats.ttft_ms) / 1000)
            if rate := stats.decode_tokens_per_second:
                self._per_token.observe(1 / rate)


class GatewayCounts(Collector):
    """What the scheduler and the prefix cache count anyway."""

    def __init__(self, served: ServedRuntime, model: str) -> None:
        self._served, self._labels = served, (model, _ENGINE)

    def collect(self) -> Iterator[Metric]:
        stats, cache = self._served.scheduler_stats, self._served.prefix_cache
        for name, what, value in (
            ("num_requests_waiting", "Requests that have not begun", stats.waiting),
            ("num_requests_running", "Requests that share the passes now", stats.running),
            ("kv_cache_usage_perc", "Used / all slots of the KV cache, 1 being all", stats.kv_usage),
            ("gpu_cache_usage_perc", "The same under its former name", stats.kv_usage),
        ):
            yield self._family(GaugeMetricFamily, name, what, value)
        for name, what, value in (
            ("prompt_tokens", "Tokens of prompts that began", stats.prompt_tokens),
            ("generation_tokens", "Tokens that were generated", stats.new_tokens),
            ("num_preemptions", "Requests that lost their place: none ever does", 0),
            ("spec_decode_num_drafts", "Rounds that verified a draft", stats.draft_rounds),
            ("spec_decode_num_draft_tokens", "Tokens that were drafted and verified", stats.drafted),
            ("spec_decode_num_accepted_tokens", "Of those, accepted", stats.accepted),
        ):
            yield self._family(CounterMetricFamily, name, what, value)
        by_depth = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place", labels=(*_LABELS, "position")
        )
        for depth, accepted in enumerate(stats.accepted_by_depth):
            by_depth.add_metric((*self._labels, str(depth)), accepted)
        yield by_depth
        if cache is None:
            return
        kept = cache.get_stats()
        for name, what, value in (
            ("prefix_cache_queries", "Tokens that were looked up", kept.total_tokens_processed),
            ("prefix_cache_hits", "Of those, not computed again", kept.tokens_reused),
        ):
            yield self._family(CounterMetricFamily, name, what, value)
        shape = (str(PAGE), str(cache.config.max_cached_tokens // PAGE))
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The prefix cache's pages", labels=("engine", "block_size", "num_gpu_blocks")
        )
        info.add_metric((_ENGINE, *shape), 1)
        yield info

    def _family(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, what: str, value: float
    ) -> Metric:
        made = kind(f"vllm:{name}", what, labels=_LABELS)
        made.add_metric(self._labels, value)
        return made
