"""Traffic windows as the operator computes them from gateways' metrics."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cleave.api.deployment import Slo
from cleave.gateway.metrics.gateway_metrics import LENGTH_BOUNDS, TPOT_BOUNDS_S, TTFT_BOUNDS_S
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace
from cleave.traffic.counters import Buckets
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import Demand

PERIOD_S = 15.0


def count(values, bounds) -> Buckets:
    """A histogram of `values` with `bounds` and infinity."""
    bounds = (*bounds, math.inf)
    counts = np.searchsorted(np.sort(values), bounds, side="right")
    return Buckets(bounds, tuple(counts.astype(float).tolist()), float(np.sum(values)))


def draw(demand: Demand, num: int, start_s: float = 0.0, seed: int = 0) -> Iterator[TrafficWindow]:
    """Arrivals and lengths of `num` periods, without latencies."""
    trace = demand.draw(int(num * PERIOD_S * demand.rate * 1.5) + 100, seed=seed)
    assert trace.arrival_ms[-1] > num * PERIOD_S * 1000
    for number, arrived in enumerate(_split(trace, num)):
        yield TrafficWindow(
            end_s=start_s + (number + 1) * PERIOD_S,
            length_s=PERIOD_S,
            num_requests=float(arrived.stop - arrived.start),
            prompts=count(trace.prompt_tokens[arrived], LENGTH_BOUNDS),
            outputs=count(trace.output_tokens[arrived], LENGTH_BOUNDS),
        )


def observe(
    trace: Trace, outcome: SimulationResult, slo: Slo, start_s: float = 0.0
) -> list[TrafficWindow]:
    """The gateways' metrics of a simulated fleet until the last arrival: requests count when they
    end."""
    ttft_ms, tpot_ms, end_ms = outcome.ttft_ms, outcome.tpot_ms, outcome.end_ms
    met = (ttft_ms <= slo.ttft_ms) & (tpot_ms <= slo.tpot_ms)
    windows = []
    for number, arrived in enumerate(_split(trace, int(trace.arrival_ms[-1] / 1000 / PERIOD_S))):
        ended = np.floor(end_ms / 1000 / PERIOD_S) == number
        window = TrafficWindow(
            end_s=start_s + (number + 1) * PERIOD_S,
            length_s=PERIOD_S,
            num_requests=float(arrived.stop - arrived.start),
            prompts=count(trace.prompt_tokens[ended], LENGTH_BOUNDS),
            outputs=count(trace.output_tokens[ended], LENGTH_BOUNDS),
            ttft=count(ttft_ms[ended] / 1000, TTFT_BOUNDS_S),
            tpot=count(tpot_ms[ended & (trace.output_tokens > 1)] / 1000, TPOT_BOUNDS_S),
            measured=float(np.count_nonzero(ended)),
            attained=float(np.count_nonzero(met & ended)),
        )
        windows.append(window)
    return windows


def _split(trace: Trace, num: int) -> Iterator[slice]:
    edges = np.searchsorted(trace.arrival_ms, np.arange(num + 1) * PERIOD_S * 1000)
    return (slice(*pair) for pair in pairwise(edges.tolist()))
