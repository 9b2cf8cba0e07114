"""vLLM's Prometheus metrics of the emulated engine, under vLLM's names.

The engine counts in plain integers (a token costs well under a microsecond), and a collector turns
them into Prometheus samples at each scrape. Names, labels and buckets are those of vLLM 0.32.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

_LABELS = ("model_name", "engine")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_REASONS = ("stop", "length", "abort", "error")

# fmt: off
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TRANSFER_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
# fmt: on
_TRANSFER_BYTES = tuple(2**exponent for exponent in range(10, 34, 2))


class EmulatedHistogram:
    """Counts per bucket and a sum; `name` without vLLM's prefix."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def accumulate(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: upper bound as text, number of values at or below it."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return buckets


class EngineMetrics:
    """Counters and histograms of the engine."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prompt_tokens_by_source = dict.fromkeys(_SOURCES, 0)
        self.finished = dict.fromkeys(_REASONS, 0)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.external_queries = 0
        self.external_hits = 0
        self.failed_transfers = 0
        self.failed_notifications = 0
        self.kv_expired = 0
        self.corrupt_transfers = 0
        self.foreign_pulls = 0
        self.iteration_tokens = EmulatedHistogram("iteration_tokens_total", _ITERATION_TOKENS)
        self.ttft_s = EmulatedHistogram("time_to_first_token_seconds", _TTFT_S)
        self.itl_s = EmulatedHistogram("inter_token_latency_seconds", _TOKEN_S)
        self.tpot_s = EmulatedHistogram("request_time_per_output_token_seconds", _TOKEN_S)
        self.e2e_s = EmulatedHistogram("e2e_request_latency_seconds", _REQUEST_S)
        self.queue_s = EmulatedHistogram("request_queue_time_seconds", _REQUEST_S)
        self.prefill_s = EmulatedHistogram("request_prefill_time_seconds", _REQUEST_S)
        self.decode_s = EmulatedHistogram("request_decode_time_seconds", _REQUEST_S)
        self.transfer_s = EmulatedHistogram("nixl_xfer_time_seconds", _TRANSFER_S)
        self.transfer_bytes = EmulatedHistogram("nixl_bytes_transferred", _TRANSFER_BYTES)

    def list_counters(self) -> Iterable[tuple[str, float]]:
        """Yield plain counters as (name without prefix, value)."""
        yield "num_preemptions", self.num_preemptions
        yield "prompt_tokens", self.prompt_tokens
        yield "generation_tokens", self.generation_tokens
        yield "prefix_cache_queries", self.prefix_queries
        yield "prefix_cache_hits", self.prefix_hits
        yield "external_prefix_cache_queries", self.external_queries
        yield "external_prefix_cache_hits", self.external_hits
        yield "nixl_num_failed_transfers", self.failed_transfers
        yield "nixl_num_failed_notifications", self.failed_notifications
        yield "nixl_num_kv_expired_reqs", self.kv_expired
        yield "emulated_corrupt_transfers", self.corrupt_transfers
        yield "emulated_foreign_pulls", self.foreign_pulls

    def list_histograms(self) -> Iterable[EmulatedHistogram]:
        """Yield all histograms."""
        return (each for each in vars(self).values() if isinstance(each, EmulatedHistogram))


class EngineMetricsCollector:
    """Turns `EngineMetrics` and the engine's present state into Prometheus samples."""

    def __init__(
        self,
        model_name: str,
        metrics: EngineMetrics,
        gauges: Callable[[], dict[str, float]],
        cache_config: dict[str, str],
    ) -> None:
        self._labels = (model_name, "0")
        self._metrics = metrics
        self._gauges = gauges
        self._cache_config = cache_config

    def build_registry(self) -> CollectorRegistry:
        """Return a registry that contains only this collector."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def collect(self) -> Iterable[Metric]:
        """Yield all samples; called at each scrape."""
        for name, value in self._gauges().items():
            gauge = GaugeMetricFamily(f"vllm:{name}", name, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "cache_config_info", labels=("engine", *self._cache_config)
        )
        info.add_metric(("0", *self._cache_config.values()), 1.0)
        yield info
        for name, value in self._metrics.list_counters():
            yield self._build_counter(name, {(): value})
        metrics = self._metrics
        sources, reasons = metrics.prompt_tokens_by_source, metrics.finished
        yield self._build_counter("prompt_tokens_by_source", _key_by_label(sources), "source")
        yield self._build_counter("request_success", _key_by_label(reasons), "finished_reason")
        for histogram in metrics.list_histograms():
            name = histogram.name
            family = HistogramMetricFamily(f"vllm:{name}", name, labels=_LABELS)
            family.add_metric(self._labels, histogram.accumulate(), histogram.sum)
            yield family

    def _build_counter(
        self, name: str, values: dict[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", name, labels=(*_LABELS, *labels))
        for extra, value in values.items():
            family.add_metric((*self._labels, *extra), value)
        return family


def _key_by_label(counts: dict[str, int]) -> dict[tuple[str, ...], float]:
    return {(label,): count for label, count in counts.items()}
