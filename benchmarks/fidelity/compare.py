"""What the simulator said beside what clients saw, for the same arrivals and lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from iteration_times import PassScale
from load import Seen
from numpy.typing import NDArray

from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace

PERCENTILES = (50, 90, 95, 99)
MEASURES = ("ttft_ms", "tpot_ms", "normalised_ms")


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets in milliseconds of the trace."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load on one fleet."""

    share: float
    """Of capacity."""
    rate: float
    requests: int
    attainment: tuple[float, float]
    """Measured, simulated (the mean of all draws); shares."""
    chance_points: float
    """Standard deviation of the simulated attainment over draws, in points."""
    worst_points: float
    """Largest difference of attainment, in points, with targets from half to double the SLO."""
    percentiles: Mapping[str, Mapping[str, tuple[float, float]]]
    """Measure -> p50 ... -> measured, simulated; over requests that both finished, `itl_ms` over
    the gaps between all tokens."""
    failed: int
    lag_p99_ms: float
    """Of the load generator, in milliseconds of the trace."""
    busy_share: float
    """Of this machine's cores."""
    pass_scale: PassScale
    """Of the simulated passes."""
    cached: tuple[float, float]
    """Share of prompt tokens found in prefix caches, or pulled from them: measured, simulated."""

    @property
    def points(self) -> float:
        """Simulated less measured attainment, in points."""
        return (self.attainment[1] - self.attainment[0]) * 100

    def error(self, measure: str, percentile: int) -> float:
        """Relative error of the simulation, 0.05 for 5 % too high."""
        measured, simulated = self.percentiles[measure][f"p{percentile}"]
        return simulated / measured - 1 if measured else 0.0


def compare(
    share: float,
    trace: Trace,
    seen: Seen,
    outcomes: Sequence[SimulationResult],
    slo: Slo,
    pass_scale: PassScale,
) -> Comparison:
    """Both sides of one load; failed requests meet no target.

    `outcomes`: the first with the arrivals as they were sent, whose latencies are compared.
    """
    measured = {
        "ttft_ms": seen.first_token_ms,
        "tpot_ms": seen.tpot_ms(trace),
        "normalised_ms": seen.end_ms / trace.output_tokens,
    }
    draws = [_times(outcome) for outcome in outcomes]
    both = np.isfinite(measured["ttft_ms"]) & np.isfinite(draws[0]["ttft_ms"])
    sides = measured, draws[0]
    attained = [_attainment(draw, slo) for draw in draws]
    differences = [
        abs(
            _attainment(measured, slo, scale)
            - np.mean([_attainment(draw, slo, scale) for draw in draws])
        )
        for scale in np.linspace(0.5, 2.0, 31)
    ]
    return Comparison(
        share=share,
        rate=trace.rate,
        requests=len(trace),
        attainment=(_attainment(measured, slo), float(np.mean(attained))),
        chance_points=float(np.std(attained)) * 100,
        worst_points=float(max(differences)) * 100,
        percentiles={
            name: {
                f"p{percentile}": tuple(
                    float(np.percentile(side[name][both], percentile)) for side in sides
                )
                for percentile in PERCENTILES
            }
            for name in MEASURES
        }
        | {"itl_ms": _compare_gaps(seen, outcomes[0])},
        failed=len(seen.faults),
        lag_p99_ms=float(np.nanpercentile(seen.lag_ms, 99)),
        busy_share=seen.busy_share,
        pass_scale=pass_scale,
        cached=(_measure_cached(seen), _sum_cached(outcomes[0], trace)),
    )


def _compare_gaps(seen: Seen, outcome: SimulationResult) -> dict[str, tuple[float, float]]:
    return {
        f"p{percentile}": (
            float(np.percentile(seen.gaps_ms, percentile)),
            outcome.itl.compute_quantile(percentile / 100),
        )
        for percentile in PERCENTILES
    }


def _measure_cached(seen: Seen) -> float:
    computed, *found = seen.prompt_tokens
    return sum(found) / max(computed + sum(found), 1.0)


def _sum_cached(outcome: SimulationResult, trace: Trace) -> float:
    found = outcome.cached_tokens.sum() + outcome.fetched_tokens.sum()
    return float(found / trace.prompt_tokens.sum())


def _times(outcome: SimulationResult) -> dict[str, NDArray[np.float64]]:
    return {
        "ttft_ms": outcome.ttft_ms,
        "tpot_ms": outcome.tpot_ms,
        # Orca's measure, as in Vidur, section 7.2.
        "normalised_ms": (outcome.end_ms - outcome.arrival_ms) / outcome.output_tokens,
    }


def _attainment(side: Mapping[str, NDArray[np.float64]], slo: Slo, scale: float = 1.0) -> float:
    met = (side["ttft_ms"] <= slo.ttft_ms * scale) & (side["tpot_ms"] <= slo.tpot_ms * scale)
    return float(np.mean(met))
