"""What the loop knows of each deployment, as Prometheus metrics: read from statuses at a scrape.

Every operator tells the same, whether it leads or not; queries take the largest of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from cleave.controller import conditions
from cleave.controller.loop.turn import DRIFTED, HOLDS
from cleave.pods.labels import Manifest

_OF = ("deployment", "model")
Statuses = Mapping[str, Manifest]
"""By deployment, as NAMESPACE/NAME."""


def collect(statuses: Statuses) -> Iterable[Metric]:
    """Of all deployments whose plans are compared with what runs."""
    error = _gauge("prediction_error", "Largest error of the prediction for what runs, a share")
    latency = _gauge(
        "latency_seconds", "Predicted and observed of what runs", "latency", "quantile", "source"
    )
    attainment = _gauge("attainment", "Predicted and observed of what runs", "source")
    correction = _gauge("correction", "What passes of the latency model are multiplied by", "phase")
    drifted = _gauge("plan_drifted", "1 while traffic is not what was planned for")
    holds = _gauge("prediction_holds", "0 while the latency model is wrong about what runs")
    for name, status in statuses.items():
        of = [name, status.get("model", "")]
        told = {each.type: each.status for each in conditions.read(status)}
        for family, kind in ((drifted, DRIFTED), (holds, HOLDS)):
            if (is_so := told.get(kind)) is not None:
                family.add_metric(of, float(is_so))
        predicted: Manifest = status.get("prediction") or {}
        if predicted.get("error") is not None:
            error.add_metric(of, predicted["error"])
        for source, figures in (
            ("predicted", predicted),
            ("observed", status.get("observed") or {}),
        ):
            _add_figures(latency, attainment, of, source, figures)
        if DRIFTED in told:
            factors = status.get("correction") or {}
            for phase in ("prefill", "decode"):
                correction.add_metric([*of, phase], factors.get(phase, 1.0))
    return error, latency, attainment, correction, drifted, holds


def _add_figures(
    latency: GaugeMetricFamily,
    attainment: GaugeMetricFamily,
    of: list[str],
    source: str,
    figures: Mapping[str, Any],
) -> None:
    if figures.get("attainment") is not None:
        attainment.add_metric([*of, source], figures["attainment"])
    for name, key in (("ttft", "ttftMs"), ("tpot", "tpotMs")):
        known = figures.get(key) or {}
        for quantile, field in (("0.5", "p50"), ("0.9", "p90")):
            if known.get(field) is not None:
                latency.add_metric([*of, name, quantile, source], known[field] / 1000)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cleave_operator_{name}", text, labels=[*_OF, *labels])
