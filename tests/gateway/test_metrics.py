"""Own counters against prometheus_client's."""

import random

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Reference

from cleave.gateway.metrics import TTFT_BOUNDS_S, Collector, Metrics


def test_histograms_are_written_as_prometheus_itself_would() -> None:
    rng = random.Random(7)
    metrics, registry, own = Metrics(), CollectorRegistry(), CollectorRegistry()
    name, text = "cleave_gateway_ttft_seconds", "Request read to first byte of stream"
    reference = Reference(name, text, ["model"], buckets=TTFT_BOUNDS_S, registry=registry)
    for value in [*TTFT_BOUNDS_S, *(rng.expovariate(1.0) for _ in range(1_000)), 0.0, 1e6]:
        metrics.models["m"].ttft.observe(value)
        reference.labels("m").observe(value)
    own.register(Collector(metrics))
    lines = [
        {line for line in generate_latest(r).decode().splitlines() if line.startswith(name)}
        for r in (own, registry)
    ]
    assert lines[0] == {line for line in lines[1] if "_created" not in line}
