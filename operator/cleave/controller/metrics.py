"""The operator's own metrics: plain counters, converted to Prometheus metrics at each scrape."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import PLAN_RESULTS
from cleave.controller.deployment.kv_path import KV_RATE_AS_PLANNED
from cleave.controller.replan.verdict import PLAN_DRIFTED, PREDICTION_HOLDS
from cleave.manifests.labels import Manifest

_PLAN_LABELS = ("deployment", "model")
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Statuses = Mapping[str, Manifest]
"""By deployment, as NAMESPACE/NAME."""


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
        """Planner results: planned, infeasible, failed; reviews: keep, correct, propose, apply."""
        self.webhook_expiry_s: float | None = None
        """Unix time when the webhook's certificate expires; None: none is served."""
        self._buckets: dict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_S) + 1))
        self._duration_sums: dict[str, float] = defaultdict(float)

    def record_reconcile(self, kind: str, outcome: str, seconds: float) -> None:
        """Count one reconcile and its duration."""
        self.reconciles[kind, outcome] += 1
        self._buckets[kind][bisect_left(_BOUNDS_S, seconds)] += 1
        self._duration_sums[kind] += seconds

    def build_durations(self) -> HistogramMetricFamily:
        """Return the histogram of reconcile durations, writes included."""
        name, text = "cleave_operator_reconcile_seconds", "Duration of reconciles including writes"
        family = HistogramMetricFamily(name, text, labels=["kind"])
        names = [*map(str, _BOUNDS_S), "+Inf"]
        for kind, counts in self._buckets.items():
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
        # Plans are rare, and Prometheus sees no increase in the first sample of a series.
        plans: dict[tuple[str, ...], int] = dict.fromkeys(((each,) for each in PLAN_RESULTS), 0)
        plans |= counted.plans
        yield _build_counter("plans", "Planner results", ("result",), plans)
        yield from collect_plan_metrics(self._statuses())
        yield counted.build_durations()
        depth, leading = self._queued(), float(self._is_leading())
        yield GaugeMetricFamily("cleave_operator_queue_depth", "Objects due for a reconcile", depth)
        text = "1 while this operator is the leader"
        yield GaugeMetricFamily("cleave_operator_leading", text, leading)
        name = "cleave_operator_webhook_certificate_expiry_timestamp_seconds"
        text = "Unix time when the webhook's certificate expires"
        yield GaugeMetricFamily(name, text, counted.webhook_expiry_s)
        cached = GaugeMetricFamily("cleave_operator_objects", "Cached objects", labels=["kind"])
        for kind, number in self._objects().items():
            cached.add_metric([kind], number)
        yield cached


def _build_counter(
    name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cleave_operator_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def collect_plan_metrics(statuses: Statuses) -> Iterable[Metric]:
    """Return the metrics of all deployments whose plans are reviewed, from their statuses. Every
    operator exposes the same values, whether it leads or not; queries take the maximum."""
    error = _make_gauge("prediction_error", "Largest relative prediction error of the running plan")
    text = "Predicted and observed latency of the running plan"
    latency = _make_gauge("latency_seconds", text, "latency", "quantile", "source")
    text = "Predicted and observed SLO attainment of the running plan"
    attainment = _make_gauge("attainment", text, "source")
    correction = _make_gauge("correction", "Factor on the latency model's iteration times", "phase")
    drifted = _make_gauge("plan_drifted", "1 while traffic differs from the planned traffic")
    text = "0 while the latency model mispredicts the running plan"
    prediction_holds = _make_gauge("prediction_holds", text)
    text = "0 while a KV self-test measured less than a quarter of the rate that the plan assumes"
    kv_rate = _make_gauge("kv_rate_as_planned", text)
    for name, status in statuses.items():
        labels = [name, status.get("model", "")]
        conditions_now = {each.type: each.status for each in conditions.read(status)}
        for family, kind in (
            (drifted, PLAN_DRIFTED),
            (prediction_holds, PREDICTION_HOLDS),
            (kv_rate, KV_RATE_AS_PLANNED),
        ):
            if (is_true := conditions_now.get(kind)) is not None:
                family.add_metric(labels, float(is_true))
        predicted: Manifest = status.get("prediction") or {}
        if predicted.get("error") is not None:
            error.add_metric(labels, predicted["error"])
        sources = {"predicted": predicted, "observed": status.get("observed") or {}}
        for source, figures in sources.items():
            _add_figures(latency, attainment, labels, source, figures)
        if PLAN_DRIFTED in conditions_now:
            correction_factors = status.get("correction") or {}
            for phase in ("prefill", "decode"):
                correction.add_metric([*labels, phase], correction_factors.get(phase, 1.0))
    return error, latency, attainment, correction, drifted, prediction_holds, kv_rate


def _add_figures(
    latency: GaugeMetricFamily,
    attainment: GaugeMetricFamily,
    labels: list[str],
    source: str,
    figures: Mapping[str, Any],
) -> None:
    if figures.get("attainment") is not None:
        attainment.add_metric([*labels, source], figures["attainment"])
    for name, key in (("ttft", "ttftMs"), ("tpot", "tpotMs")):
        percentiles = figures.get(key) or {}
        for quantile, field in (("0.5", "p50"), ("0.9", "p90")):
            if percentiles.get(field) is not None:
                latency.add_metric([*labels, name, quantile, source], percentiles[field] / 1000)


def _make_gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cleave_operator_{name}", text, labels=[*_PLAN_LABELS, *labels])
