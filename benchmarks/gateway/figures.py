"""What the runs of load.c add up to: cost per request and per token, spread over rounds.

Called by run.py; pure. What is hard: one token costs about as much as a whole request without
tokens, so the intercept of an ordinary straight line through runs of up to 256 tokens would be
mostly the noise of the longest run. The fit therefore weighs relative errors.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load generator and what the measured process spent on it."""

    requests: int
    tokens: int
    seconds: float
    ttft_p50_us: float
    ttft_p99_us: float
    cpu_us: float
    user_ticks: int
    system_ticks: int

    @property
    def cpu_us_per_request(self) -> float:
        return self.cpu_us / self.requests

    @property
    def busy_share(self) -> float:
        return self.cpu_us / (self.seconds * 1e6)

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of a streamed request: `request_us` + `token_us` * tokens."""

    request_us: float
    token_us: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all rounds."""

    median: float
    min: float
    max: float


def fit_cost(runs: Sequence[Run], idle_share: float) -> Cost:
    """Least squares of the relative error over runs of at least two lengths.

    `idle_share` of a core is spent with or without requests, so that part is left out.
    """
    idle_us = np.array([idle_share * 1e6 * run.seconds / run.requests for run in runs])
    spent = np.array([run.cpu_us_per_request for run in runs]) - idle_us
    tokens = np.array([run.tokens / run.requests for run in runs])
    scaled = np.column_stack([np.ones(len(runs)), tokens]) / spent[:, None]
    (request_us, token_us), *_ = np.linalg.lstsq(scaled, np.ones(len(runs)), rcond=None)
    return Cost(float(request_us), float(token_us))


def system_share(runs: Sequence[Run]) -> float:
    """Share of the CPU time that the kernel used, 0..1."""
    system = sum(run.system_ticks for run in runs)
    return system / max(1, system + sum(run.user_ticks for run in runs))


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
