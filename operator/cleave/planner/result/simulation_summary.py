"""Summary of one simulation: the figures that `cleave simulate` prints. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cleave.api.deployment import Slo
from cleave.api.role import Role
from cleave.planner.plan import Percentiles
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.outcome import (
    InterTokenLatencies,
    LatencyStage,
    RequestOutcome,
    SimulationResult,
    Times,
    compute_quantile,
    compute_stage_ms,
    compute_stage_shares,
)

_LEVELS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """Load of one instance over the complete simulation."""

    name: str
    """Role and number, such as `prefill-0`."""
    busy: float
    """Share of the time in which a step was running."""
    passes: int
    mean_batch: float
    """Decoding requests per step that had any; nan without such steps."""
    kv_usage: float
    """Used share of its KV memory, averaged over the time."""
    kv_peak: float
    """Largest used share of its KV memory."""
    preemptions: int
    mfu: float
    """Model FLOPs utilisation: work of the linear layers divided by what its GPUs could compute in
    the complete time (Vidur, section 5.2); nan for unknown GPUs."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of the life of requests."""

    stage: LatencyStage
    mean_ms: float
    share: float
    """Share of the time of all requests."""


@dataclass(frozen=True, slots=True)
class SimulationSummary:
    """The figures of one simulation."""

    rate: float
    num_requests: int
    num_too_long: int
    """Requests whose KV fits no instance."""
    num_unfinished: int
    """Requests that were still waiting when the simulation ended."""
    attainment: float
    ttft_attainment: float
    """Share of requests that meet the TTFT target alone."""
    tpot_attainment: float
    throughput: float
    """Output tokens per second of simulated time."""
    cached_share: float
    """Share of prompt tokens found in prefix caches; 0 unless the trace has hashes of blocks."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    """Of all times between tokens."""
    latency_ms: Percentiles
    """From arrival to the last token."""
    stages: tuple[StageTime, ...]
    instances: tuple[InstanceLoad, ...]

    def holds(self, slo: Slo) -> bool:
        """Whether all targets are met."""
        own = self.ttft_attainment, self.tpot_attainment
        return slo.is_met(self.attainment, *own, self.itl_ms.p99)


def summarize(
    outcome: SimulationResult, fleet: SimulatedFleet, rate: float, slo: Slo, mfu: Times
) -> SimulationSummary:
    """Summarize one outcome, with `mfu` per instance. Unfinished requests count as the slowest."""
    seconds = outcome.instances.duration_ms / 1000
    tokens = float(np.sum(outcome.instances.decode_tokens))
    return SimulationSummary(
        rate=rate,
        num_requests=len(outcome.arrival_ms),
        num_too_long=int(np.count_nonzero(outcome.outcome == RequestOutcome.TOO_LONG)),
        num_unfinished=int(np.count_nonzero(outcome.outcome == RequestOutcome.UNFINISHED)),
        attainment=outcome.compute_attainment(slo.ttft_ms, slo.tpot_ms),
        ttft_attainment=outcome.compute_attainment(slo.ttft_ms, math.inf),
        tpot_attainment=outcome.compute_attainment(math.inf, slo.tpot_ms),
        throughput=tokens / seconds if seconds else 0.0,
        cached_share=outcome.cached_share,
        ttft_ms=compute_percentiles(outcome.ttft_ms),
        tpot_ms=compute_percentiles(outcome.tpot_ms),
        itl_ms=compute_itl_percentiles(outcome.itl),
        latency_ms=compute_percentiles(outcome.end_ms - outcome.arrival_ms),
        stages=tuple(_summarize_stages(outcome)),
        instances=tuple(_summarize_instances(outcome, fleet, mfu)),
    )


def compute_percentiles(values: Times) -> Percentiles:
    """P50, P90 and P99; nan counts as infinite."""
    return Percentiles(*(compute_quantile(values, level) for level in _LEVELS))


def compute_itl_percentiles(itl: InterTokenLatencies) -> Percentiles:
    """The same of times between tokens."""
    return Percentiles(*map(itl.compute_quantile, _LEVELS))


def list_instance_names(fleet: SimulatedFleet) -> list[str]:
    """Role and number of every engine, in the order of the outcome's arrays: the instances, or
    their data-parallel ranks."""
    pools_by_role = zip(Role, (fleet.prefill, fleet.decode, fleet.mixed), strict=True)
    return [
        f"{role}-{number}"
        for role, pools in pools_by_role
        for number in range(sum(pool.engines for pool in pools))
    ]


def _summarize_stages(outcome: SimulationResult) -> Iterator[StageTime]:
    shares = compute_stage_shares(outcome)
    ended = ~np.isnan(outcome.end_ms)
    for stage, ms in compute_stage_ms(outcome).items():
        mean = float(np.nanmean(ms[ended])) if np.any(ended) else math.nan
        yield StageTime(stage, mean, shares[stage])


def _summarize_instances(
    outcome: SimulationResult, fleet: SimulatedFleet, mfu: Times
) -> Iterator[InstanceLoad]:
    counters = outcome.instances
    pools = (*fleet.prefill, *fleet.decode, *fleet.mixed)
    tokens = [pool.engine.kv_capacity_tokens for pool in pools]
    capacity = np.repeat(tokens, [pool.engines for pool in pools])
    duration_ms = counters.duration_ms or math.inf
    usage = counters.kv_token_ms / (capacity * duration_ms)
    for index, name in enumerate(list_instance_names(fleet)):
        yield InstanceLoad(
            name=name,
            busy=float(counters.busy_ms[index]) / duration_ms,
            passes=int(counters.iterations[index]),
            mean_batch=float(counters.mean_batch[index]),
            kv_usage=float(usage[index]),
            kv_peak=float(counters.kv_peak_tokens[index] / capacity[index]),
            preemptions=int(counters.num_preemptions[index]),
            mfu=float(mfu[index]),
        )
