"""A fleet in virtual time whose plan may change: what it serves and what gateways would report."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cleave.api.deployment import Slo
from cleave.gateway.metrics.gateway_metrics import LENGTH_BOUNDS, TPOT_BOUNDS_S, TTFT_BOUNDS_S
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic.counters import Buckets
from cleave.traffic.window import TrafficWindow

PERIOD_S = 15.0
"""Between two looks at the gateways."""
AHEAD_S = 600.0
"""That are simulated at a time."""


@dataclass(frozen=True, eq=False)
class _Part:
    """What arrived while one plan was in force; it ends on the instances of then."""

    trace: Trace
    outcome: SimulationResult


@dataclass(eq=False)
class VirtualFleet:
    """Serves one trace."""

    trace: Trace
    slo: Slo
    fleet: SimulatedFleet
    since_s: float = 0.0
    """When `fleet` came into force."""
    done: list[_Part] = field(default_factory=list)
    _ahead: tuple[float, _Part] | None = None
    """What `fleet` makes of all that comes until then. Nothing that comes later changes what was
    before, so looks need not be simulated one by one."""

    def change(self, fleet: SimulatedFleet, at_s: float) -> None:
        """Requests that arrive from now on meet `fleet`; all others end where they are."""
        self.done.append(self._serve(at_s))
        self.fleet, self.since_s, self._ahead = fleet, at_s, None

    def look(self, start_s: float, end_s: float) -> Iterator[TrafficWindow]:
        """What was counted in each period: arrivals, and the requests that ended."""
        parts = (*self.done, self._look_ahead(end_s))
        edges = np.arange(start_s, end_s + PERIOD_S / 2, PERIOD_S)
        for low_s, high_s in pairwise(edges.tolist()):
            yield self._count(parts, low_s, high_s)

    def close(self, end_s: float) -> "Score":
        """All is over."""
        parts = (*self.done, self._serve(end_s))
        return Score(
            np.concatenate([part.trace.arrival_ms for part in parts]) / 1000,
            np.concatenate([part.outcome.ttft_ms <= self.slo.ttft_ms for part in parts]),
            np.concatenate([part.outcome.tpot_ms <= self.slo.tpot_ms for part in parts]),
            sum(part.outcome.num_flips for part in parts),
        )

    def _look_ahead(self, until_s: float) -> _Part:
        if self._ahead is None or self._ahead[0] < until_s:
            ahead_s = until_s + AHEAD_S
            self._ahead = ahead_s, self._serve(ahead_s)
        return self._ahead[1]

    def _serve(self, until_s: float) -> _Part:
        low, high = np.searchsorted(self.trace.arrival_ms, [self.since_s * 1000, until_s * 1000])
        came = slice(int(low), int(high))
        part = Trace(
            self.trace.arrival_ms[came],
            self.trace.prompt_tokens[came],
            self.trace.output_tokens[came],
        )
        return _Part(part, simulate(self.fleet, part))

    def _count(self, parts: Iterable[_Part], low_s: float, high_s: float) -> TrafficWindow:
        arrived = 0
        columns: list[list[np.ndarray]] = [[] for _ in range(5)]
        for part in parts:
            outcome, trace = part.outcome, part.trace
            arrived += int(np.count_nonzero(_is_in(trace.arrival_ms, low_s, high_s)))
            ended = _is_in(outcome.end_ms, low_s, high_s)
            several = ended & (trace.output_tokens > 1)
            found = (
                *(trace.prompt_tokens[ended], trace.output_tokens[ended]),
                *(outcome.ttft_ms[ended] / 1000, outcome.tpot_ms[several] / 1000),
                _find_met(outcome, self.slo)[ended],
            )
            for column, values in zip(columns, found, strict=True):
                column.append(values)
        prompts, outputs, ttft, tpot, met = map(np.concatenate, columns)
        return TrafficWindow(
            end_s=high_s,
            length_s=high_s - low_s,
            num_requests=float(arrived),
            prompts=_bucket(prompts, LENGTH_BOUNDS),
            outputs=_bucket(outputs, LENGTH_BOUNDS),
            ttft=_bucket(ttft, TTFT_BOUNDS_S),
            tpot=_bucket(tpot, TPOT_BOUNDS_S),
            measured=float(len(met)),
            attained=float(np.count_nonzero(met)),
        )


@dataclass(frozen=True, eq=False)
class Score:
    """Which requests met which target."""

    arrival_s: np.ndarray
    in_time: np.ndarray
    """The first token."""
    fluent: np.ndarray
    """The others."""
    num_flips: int

    @property
    def met(self) -> np.ndarray:
        """Both."""
        return np.asarray(self.in_time & self.fluent)

    def between(self, start_s: float, end_s: float) -> float:
        """Share of those that came then."""
        came = (self.arrival_s >= start_s) & (self.arrival_s < end_s)
        return float(np.mean(self.met[came]))


def _find_met(outcome: SimulationResult, slo: Slo) -> np.ndarray:
    return (outcome.ttft_ms <= slo.ttft_ms) & (outcome.tpot_ms <= slo.tpot_ms)


def _is_in(times_ms: np.ndarray, low_s: float, high_s: float) -> np.ndarray:
    return (times_ms >= low_s * 1000) & (times_ms < high_s * 1000)


def _bucket(values: np.ndarray, bounds: Iterable[float]) -> Buckets:
    return Buckets.from_values(values.tolist(), (*bounds, math.inf))
