"""Prometheus metrics about plans, read from the statuses at each scrape.

Every operator exposes the same values, whether it leads or not; queries take the maximum.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.controller.cluster import conditions
from cleave.controller.replan.outcome import PLAN_DRIFTED, PREDICTION_HOLDS
from cleave.manifests.labels import Manifest

_LABELS = ("deployment", "model")
Statuses = Mapping[str, Manifest]
"""By deployment, as NAMESPACE/NAME."""


def collect(statuses: Statuses) -> Iterable[Metric]:
    """Return the metrics of all deployments whose plans are reviewed."""
    error = _make_gauge("prediction_error", "Largest relative prediction error of the running plan")
    latency = _make_gauge(
        "latency_seconds",
        "Predicted and observed latency of the running plan",
        "latency",
        "quantile",
        "source",
    )
    attainment = _make_gauge(
        "attainment", "Predicted and observed SLO attainment of the running plan", "source"
    )
    correction = _make_gauge("correction", "Factor on the latency model's iteration times", "phase")
    drifted = _make_gauge("plan_drifted", "1 while traffic differs from the planned traffic")
    prediction_holds = _make_gauge(
        "prediction_holds", "0 while the latency model mispredicts the running plan"
    )
    for name, status in statuses.items():
        labels = [name, status.get("model", "")]
        conditions_now = {each.type: each.status for each in conditions.read(status)}
        for family, kind in ((drifted, PLAN_DRIFTED), (prediction_holds, PREDICTION_HOLDS)):
            if (is_true := conditions_now.get(kind)) is not None:
                family.add_metric(labels, float(is_true))
        predicted: Manifest = status.get("prediction") or {}
        if predicted.get("error") is not None:
            error.add_metric(labels, predicted["error"])
        for source, figures in (
            ("predicted", predicted),
            ("observed", status.get("observed") or {}),
        ):
            _add_figures(latency, attainment, labels, source, figures)
        if PLAN_DRIFTED in conditions_now:
            correction_factors = status.get("correction") or {}
            for phase in ("prefill", "decode"):
                correction.add_metric([*labels, phase], correction_factors.get(phase, 1.0))
    return error, latency, attainment, correction, drifted, prediction_holds


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
    return GaugeMetricFamily(f"cleave_operator_{name}", text, labels=[*_LABELS, *labels])
