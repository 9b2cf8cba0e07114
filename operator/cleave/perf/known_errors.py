"""How far predicted times were from measured ones, by source: what a plan's TRUST says.

Called by cleave.perf.estimator. Each row is of published runs of vLLM as the planner plans for it,
none of which was used to fit a constant: benchmarks/prices (closed loops of InferenceX) and
benchmarks/references (LLMServingSim's recordings). Their READMEs have the same figures, which
tests/perf/test_known_errors.py compares.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Spread(NamedTuple):
    """Absolute relative errors over all runs; 0.1 for 10 %."""

    median: float
    p90: float


class ServingErrors(NamedTuple):
    """Errors of predicted latencies of requests."""

    tpot: Spread
    ttft: Spread | None
    """At low load, on RTX GPUs and of profiles with queues; None: no such runs."""


KERNELS: Mapping[str, ServingErrors] = {
    "H100-SXM-80GB": ServingErrors(Spread(0.137, 0.26), None),
    "H200-SXM-141GB": ServingErrors(Spread(0.044, 0.13), Spread(0.050, 0.11)),
    "B200-SXM-180GB": ServingErrors(Spread(0.083, 0.20), Spread(0.138, 0.26)),
    "RTX-PRO-6000-Server": ServingErrors(Spread(0.075, 0.27), Spread(0.232, 0.54)),
}
"""Of kernel tables, by GPU. The runs on H100 scheduled synchronously."""
ROOFLINE: Mapping[str, ServingErrors] = {
    "H100-SXM-80GB": ServingErrors(Spread(0.143, 0.28), None),
    "H200-SXM-141GB": ServingErrors(Spread(0.066, 0.19), Spread(0.049, 0.09)),
    "B200-SXM-180GB": ServingErrors(Spread(0.085, 0.17), Spread(0.155, 0.32)),
    "RTX-4090": ServingErrors(Spread(0.246, 0.27), Spread(0.299, 0.34)),
}
OPERATORS = ServingErrors(Spread(0.073, 0.10), Spread(0.093, 0.29))
"""Of profiles of single layers, on any GPU."""
MIXED_OPERATORS = ServingErrors(Spread(0.012, 0.04), Spread(0.033, 0.24))
"""The same with attention of prompts and decoding in one kernel."""
