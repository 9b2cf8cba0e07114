"""The operator's own metrics: plain counters, converted to Prometheus metrics at each scrape."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from cleave.controller.replan.metrics import Statuses, collect

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class OperatorMetrics:
    """Counters of this operator since its start."""

    def __init__(self) -> None:
        self.reconciles: dict[tuple[str, ...], int] = defaultdict(int)
        """By kind and outcome: idle (nothing to do), changed, stale, failed, gone."""
        self.actions: dict[tuple[str, ...], int] = defaultdict(int)
        """Writes by action and outcome: done, failed."""
        self.events: dict[tuple[str, ...], int] = defaultdict(int)
        """Watch events by kind and type."""
        self.plans: dict[tuple[str, ...], int] = defaultdict(int)
        """Planner results: planned, infeasible, failed; of reviews: keep, correct, propose,
        apply."""
        self._duration_buckets: dict[str, list[int]] = defaultdict(
            lambda: [0] * (len(_BOUNDS_S) + 1)
        )
        self._duration_sums: dict[str, float] = defaultdict(float)

    def record_reconcile(self, kind: str, outcome: str, seconds: float) -> None:
        """Count one reconcile and its duration."""
        self.reconciles[kind, outcome] += 1
        self._duration_buckets[kind][bisect_left(_BOUNDS_S, seconds)] += 1
        self._duration_sums[kind] += seconds

    def build_durations(self) -> HistogramMetricFamily:
        """Return the histogram of reconcile durations, writes included."""
        family = HistogramMetricFamily(
            "cleave_operator_reconcile_seconds",
            "Duration of reconciles including writes",
            labels=["kind"],
        )
        names = [*map(str, _BOUNDS_S), "+Inf"]
        for kind, counts in self._duration_buckets.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            family.add_metric([kind], buckets, self._duration_sums[kind])
        return family


class OperatorCollector:
    """Converts the counters to metric families; registered with prometheus_client."""

    def __init__(
        self,
        metrics: OperatorMetrics,
        *,
        queued: Callable[[], int],
        objects: Callable[[], Mapping[str, int]],
        is_leading: Callable[[], bool],
        statuses: Callable[[], Statuses],
    ) -> None:
        self._metrics, self._statuses = metrics, statuses
        self._queued, self._objects, self._is_leading = queued, objects, is_leading

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics; prometheus_client calls this at each scrape."""
        counted = self._metrics
        yield _build_counter("reconciles", "Reconciles", ("kind", "outcome"), counted.reconciles)
        yield _build_counter("actions", "Writes", ("action", "outcome"), counted.actions)
        yield _build_counter("events", "Watch events", ("kind", "type"), counted.events)
        yield _build_counter("plans", "Planner results", ("result",), counted.plans)
        yield from collect(self._statuses())
        yield counted.build_durations()
        yield GaugeMetricFamily(
            "cleave_operator_queue_depth", "Objects due for a reconcile", self._queued()
        )
        yield GaugeMetricFamily(
            "cleave_operator_leading",
            "1 while this operator is the leader",
            float(self._is_leading()),
        )
        cached_objects = GaugeMetricFamily(
            "cleave_operator_objects", "Cached objects", labels=["kind"]
        )
        for kind, number in self._objects().items():
            cached_objects.add_metric([kind], number)
        yield cached_objects


def _build_counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cleave_operator_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family
