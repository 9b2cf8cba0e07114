"""How a plan scales with its traffic: Aladdin's laws for one problem.

For `cleave plan --explain`, and for the operator's autoscaling of a running plan. Eq. 6 gives
the best number of GPUs per worker, Eq. 7 the number of workers at other rates. What is hard: a
worker is the smallest unit that can be added to the plan. That is one mixed instance, or the
smallest group of prefill and decode instances in the plan's proportion.
"""

from dataclasses import dataclass, replace
from typing import Any

from cleave.api.plan import PlanGrowth
from cleave.perf.estimate import Estimate
from cleave.planner.plan import LOW_AFFINITY, Plan, PlannedPool
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_pool
from cleave.planner.scaling_law import aladdin
from cleave.planner.scaling_law.aladdin import ScalingError, WorkerLaw, WorkerSize
from cleave.planner.search.candidate_placement import build_cell, to_planned_pools
from cleave.planner.search.capacity_bound import compute_fleet_rate
from cleave.planner.search.context import SearchContext
from cleave.planner.search.replication import merge_cells
from cleave.planner.search.trials import TrialSpan

HEARTBEAT_S = 60.0
"""Interval at which an autoscaler reads the rate; Eq. 7's lower bound depends on it."""
_RATE_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0)
"""Rates at which workers are counted, as factors on the plan's rate."""
_MAX_RAMP, _MAX_COUNTED = 4000, 2000
"""Most requests of a trial: fitting a law needs fewer than a prediction."""
_MAX_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class BestWorkerSize:
    """The result of Eq. 6 for the GPU type with the highest decode throughput per GPU."""

    gpu: str
    sizes: tuple[WorkerSize, ...]
    """Best first."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The result of Eq. 7 for one plan."""

    worker: tuple[PlannedPool, ...]
    """The unit that is added: the smallest part of the plan with its proportion of roles."""
    counts: dict[float, int]
    """Fewest workers that serve each rate (req/s), by simulation."""
    law: WorkerLaw


def find_best_size(problem: Problem) -> BestWorkerSize:
    """Tensor parallel sizes within a node, ranked by Eq. 6; among equals the first GPU type wins.
    Raises ScalingError when no size decodes within the TPOT target."""
    best_sizes: list[BestWorkerSize] = []
    faults: list[ScalingError] = []
    for gpu, workers in _list_workers(problem).items():
        try:
            sizes = aladdin.rank_worker_sizes(workers, problem.demand, problem.slo.tpot_ms)
            best_sizes.append(BestWorkerSize(gpu, sizes))
        except ScalingError as error:
            faults.append(error)
    if not best_sizes:
        faults.append(ScalingError("the model fits no worker without pipeline parallelism"))
        raise faults[0]
    return max(best_sizes, key=lambda each: each.sizes[0].tokens_per_s_per_gpu)


def fit_growth(problem: Problem, plan: Plan) -> Growth:
    """Count workers of `plan` in short simulations at five rates, and fit a line through the
    counts.

    The rates lie around the requested one, or around the plan's goodput if that is higher: below it
    one worker serves all of them. Raises ScalingError when even 1,024 do not serve a rate.
    """
    search = SearchContext.from_problem(problem)
    trials, targets = search.trials, search.targets
    # `LOW_AFFINITY` divides the pools of any algorithm into cells.
    cell = replace(to_candidate_placement(problem, plan.pools, LOW_AFFINITY), copies=1)
    is_in_node = plan.algorithm.startswith(LOW_AFFINITY)
    unit_rate = compute_fleet_rate(build_cell(problem, cell), trials.get_lengths())

    def holds(workers: int, rate: float) -> bool:
        if rate > workers * unit_rate:
            return False
        served, share = (
            (cell, rate / workers) if is_in_node else (merge_cells(cell.with_copies(workers)), rate)
        )
        span = _shorten(trials.compute_span(share, targets))
        fleet = build_cell(problem, served)
        return trials.holds(fleet, share, targets, span)

    middle = max(problem.rate, plan.prediction.goodput)
    rates = [middle * factor for factor in _RATE_FACTORS]
    counts = aladdin.count_workers(holds, rates, _MAX_WORKERS)
    lowest = aladdin.compute_lowest_rate(problem.demand, HEARTBEAT_S)
    law = replace(aladdin.fit_workers(counts), lowest_rate=lowest)
    return Growth(to_planned_pools(cell), counts, law)


def to_plan_growth(problem: Problem, plan: Plan) -> PlanGrowth | None:
    """Eq. 7 for a plan's status; None where the law cannot be fitted."""
    try:
        fitted = fit_growth(problem, plan)
    except ScalingError:
        return None
    worker, law = fitted.worker[0], fitted.law
    planned = next(pool for pool in plan.pools if pool.role is worker.role)
    num = planned.replicas // worker.replicas
    return PlanGrowth(workers=num, per_rate=law.k5, base=law.c5, lowest_rate=law.lowest_rate)


def build_document(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Both laws for JSON; null for one that cannot be fitted."""
    sizes, workers = _build_sizes_document(problem), _build_growth_document(problem, plan)
    return {"workerSizes": sizes, "workers": workers}


def _build_sizes_document(problem: Problem) -> dict[str, Any] | None:
    try:
        best = find_best_size(problem)
    except ScalingError:
        return None
    sizes = [
        {
            "gpus": size.gpus,
            "tokensPerSecondPerGPU": size.tokens_per_s_per_gpu,
            "batch": size.batch,
            "isBoundByKV": size.is_bound_by_kv,
        }
        for size in best.sizes
    ]
    return {"gpu": best.gpu, "sizes": sizes}


def _build_growth_document(problem: Problem, plan: Plan) -> dict[str, Any] | None:
    try:
        fitted = fit_growth(problem, plan)
    except ScalingError:
        return None
    return {
        "worker": " + ".join(format_pool(pool) for pool in fitted.worker),
        "k5": fitted.law.k5,
        "c5": fitted.law.c5,
        "lowestRate": fitted.law.lowest_rate,
        "counts": [{"rate": rate, "workers": count} for rate, count in fitted.counts.items()],
    }


def _list_workers(problem: Problem) -> dict[str, dict[int, Estimate]]:
    """Estimates by GPU type and number of GPUs, for the types on which the model fits."""
    workers: dict[str, dict[int, Estimate]] = {}
    for supply in problem.supplies:
        max_gpus = min(supply.gpus_per_node, supply.max_gpus, problem.max_gpus)
        for gpus in range(1, max_gpus + 1):
            estimate = problem.estimator.estimate(supply.gpu, gpus, 1)
            if estimate is not None:
                workers.setdefault(supply.gpu, {})[gpus] = estimate
    return workers


def _shorten(span: TrialSpan) -> TrialSpan:
    return replace(span, ramp=min(span.ramp, _MAX_RAMP), counted=min(span.counted, _MAX_COUNTED))
