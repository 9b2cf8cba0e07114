"""Aladdin's laws: how many GPUs a worker should have, and how many workers a rate needs.

Section 4.1 (Eq. 6) chooses the tensor parallel size once, from the model, the GPU and the
lengths; section 5.2 (Eq. 7) gives the number of workers for a rate as a line fitted to simulated
counts, so that scaling needs no search. Used by `cleave.planner.scaling_law.growth`. What is hard:
a line through counts is below some of them, and below some rate too few requests arrive per
heartbeat for any line to be valid.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cleave.perf.estimate import Estimate
from cleave.perf.timing import EngineTiming
from cleave.traffic.workload import Demand

_MAX_WORKERS = 4096
_MAX_BATCH = 4096


class ScalingError(ValueError):
    """The law cannot be fitted, or no size meets the target; one line."""


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """One number of GPUs per worker, rated by Eq. 6."""

    gpus: int
    tokens_per_s_per_gpu: float
    """T_max: most decode tokens per second and GPU."""
    is_bound_by_kv: bool
    """True: KV memory limits the batch; False: the time between tokens does."""
    batch: int
    """Requests that decode together at that throughput."""


def rank_worker_sizes(
    workers: Mapping[int, Estimate], demand: Demand, tpot_ms: float
) -> tuple[WorkerSize, ...]:
    """Sizes of a worker, the one with most throughput per GPU first (Eq. 6).

    `workers`: the estimate for each number of GPUs. Iteration times are those of the estimates,
    where the paper uses Eq. 5 for GPUs that were not measured; m_r is the mean KV of a request in
    the middle of its output. Raises ScalingError when no size can decode within `tpot_ms`.
    """
    context = demand.mean_prompt_tokens + demand.mean_output_tokens / 2
    sizes = [_compute_size(gpus, each, context, tpot_ms) for gpus, each in workers.items()]
    feasible = [size for size in sizes if size.batch]
    if not feasible:
        tried = ", ".join(str(gpus) for gpus in workers) or "none"
        raise ScalingError(
            f"tpot_ms {tpot_ms:g}: no worker of {tried} GPUs decodes a request of {context:.0f} "
            "tokens in that time"
        )
    return tuple(sorted(feasible, key=lambda size: -size.tokens_per_s_per_gpu))


def _compute_size(gpus: int, estimate: Estimate, context: float, tpot_ms: float) -> WorkerSize:
    in_memory = min(int(estimate.kv_capacity_tokens / context), _MAX_BATCH)
    in_time = _find_largest_batch(estimate.timing, context, tpot_ms)
    # Eq. 6: the smaller of both terms, each at the batch size that its own limit allows.
    batch = min(in_memory, in_time)
    tokens_per_s = _compute_tokens_per_s(estimate.timing, context, batch)
    return WorkerSize(gpus, tokens_per_s / gpus, in_memory <= in_time, batch)


def _find_largest_batch(timing: EngineTiming, context: float, tpot_ms: float) -> int:
    """Bisection: a larger batch never has a shorter step."""
    low, high = 0, _MAX_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        if timing.predict_decode_ms(middle, round(middle * context)) <= tpot_ms:
            low = middle
        else:
            high = middle - 1
    return low


def _compute_tokens_per_s(timing: EngineTiming, context: float, batch: int) -> float:
    return batch * 1000 / timing.predict_decode_ms(batch, round(batch * context)) if batch else 0.0


@dataclass(frozen=True, slots=True)
class WorkerLaw:
    """Eq. 7: N_w = ceil(k5 r + c5) for rates above a lower bound R."""

    k5: float
    """Workers per req/s."""
    c5: float
    lowest_rate: float
    """R in req/s: below it the law is an extrapolation."""

    def compute_fraction(self, rate: float) -> float:
        """Workers that `rate` needs, before rounding; 0 or more."""
        return max(self.k5 * rate + self.c5 - 1e-9, 0.0)

    def compute_workers(self, rate: float) -> int:
        """Whole workers that `rate` needs, at least one."""
        return max(1, math.ceil(self.compute_fraction(rate)))

    def holds_at(self, rate: float) -> bool:
        """Whether enough requests arrive at this rate for the law to be valid."""
        return rate > self.lowest_rate


def fit_workers(counts: Mapping[float, int], lowest_rate: float = 0.0) -> WorkerLaw:
    """Fit a line through the workers needed at several rates (req/s -> count).

    A count n means that the line lies between n - 1 and n, so it is fitted to the middles, then
    raised until it is below no count: a worker too many is cheaper than a missed target. Rates up
    to `lowest_rate` are left out. Raises ScalingError when fewer than two remain.
    """
    usable = {rate: count for rate, count in counts.items() if rate > lowest_rate}
    if (num := len(usable)) < 2:
        raise ScalingError(f"{num} rates above {lowest_rate:g} req/s; a fit of Eq. 7 needs two")
    rates = np.array(list(usable))
    workers = np.array(list(usable.values()), dtype=float)
    k5, c5 = np.polyfit(rates, workers - 0.5, 1).tolist()
    k5 = max(k5, 0.0)
    undercut = float(np.max(workers - 1 - (k5 * rates + c5)))
    # Slightly above n - 1 is enough, because the law rounds up.
    return WorkerLaw(k5, c5 + max(undercut + 1e-6, 0.0), lowest_rate)


def count_workers(
    holds: Callable[[int, float], bool], rates: Sequence[float], max_workers: int = _MAX_WORKERS
) -> dict[float, int]:
    """Fewest workers at each rate, by simulation: `holds(workers, rate)` is whether they serve it.

    More workers never serve worse and higher rates never need fewer, so each search starts where
    the last one ended. Raises ScalingError when even `max_workers` do not serve a rate.
    """
    counts: dict[float, int] = {}
    enough = 1
    for rate in sorted(rates):
        enough = counts[rate] = _find_fewest(holds, rate, enough, max_workers)
    return counts


def _find_fewest(holds: Callable[[int, float], bool], rate: float, low: int, limit: int) -> int:
    """Growing steps up from `low`, then bisection."""
    step, high = 1, low
    while not holds(high, rate):
        if high >= limit:
            raise ScalingError(f"rate {rate:g}: {limit} workers do not serve it; relax the targets")
        low, high, step = high + 1, min(high + step, limit), step * 2
    while low < high:
        middle = (low + high) // 2
        if holds(middle, rate):
            high = middle
        else:
            low = middle + 1
    return high


def compute_lowest_rate(demand: Demand, heartbeat_s: float, error: float = 0.1) -> float:
    """R of Eq. 7: the rate from which the lengths in a heartbeat are representative.

    At R the standard error of the mean length, sigma / sqrt(n), is `error` of the mean, for prompts
    and outputs; n requests arrive per heartbeat (section 5.2; the paper names the criterion and
    leaves the threshold open).
    """
    if not (heartbeat_s > 0 and 0 < error < 1):
        fault = f"heartbeat_s {heartbeat_s:g} must be above 0, error {error:g} between 0 and 1"
        raise ScalingError(fault)
    drawn = demand.draw(20_000)
    variation = max(
        float(np.std(tokens) / np.mean(tokens))
        for tokens in (drawn.prompt_tokens, drawn.output_tokens)
    )
    return (variation / error) ** 2 / heartbeat_s
