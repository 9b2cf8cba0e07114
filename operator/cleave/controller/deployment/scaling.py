"""Computes how many instances of each role run now, while the plan stays the same. Pure.

Called by the deployment's reconcile. This module keeps no state. The present counts are in the
pools, and past rates come from the gateways' counters: a restarted operator scales up at once, and
down only after it has observed long enough itself.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from cronsim import CronSim

from cleave.api.deployment import LLMDeployment
from cleave.api.plan import SelectedPlan
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.api.role import Role
from cleave.api.scaling import Scaling, ScheduledPeak
from cleave.controller.views import DeploymentView, TrafficDemand
from cleave.manifests.labels import Manifest
from cleave.planner.scaling_law.aladdin import WorkerLaw
from cleave.planner.scaling_law.growth import HEARTBEAT_S
from cleave.traffic.window import TrafficWindow

ReplicaCounts = Mapping[Role, int]

_MIN_RATE = 0.001
"""In req/s; lower rates are treated as this one."""


def measure_demand(
    windows: Sequence[TrafficWindow], calm_s: float, *, in_flight: float, idle_s: float
) -> TrafficDemand | None:
    """Compute the demand from windows, oldest first; None: there are none, and no request waits."""
    if not windows:
        return TrafficDemand(0.0, None, in_flight, idle_s) if in_flight else None
    rates = list(_compute_rates(windows))
    begins = windows[-1].end_s - calm_s
    is_observed = windows[0].start_s <= begins
    recent = [rate for rate, each in zip(rates, windows, strict=True) if each.end_s > begins]
    return TrafficDemand(rates[-1], max(recent) if is_observed else None, in_flight, idle_s)


def _compute_rates(windows: Sequence[TrafficWindow]) -> Iterator[float]:
    """Yield for each window the rate of the minute that ends with it."""
    minute: deque[TrafficWindow] = deque()
    for window in windows:
        minute.append(window)
        while sum(each.length_s for each in minute) - minute[0].length_s >= HEARTBEAT_S:
            minute.popleft()
        requests = sum(each.num_requests for each in minute)
        yield requests / sum(each.length_s for each in minute)


def is_enabled(deployment: LLMDeployment) -> bool:
    """Whether instances are scaled by traffic."""
    scaling = deployment.spec.scaling
    return bool(scaling.roles) or scaling.idle_s is not None


def is_scaled_to_zero(deployment: LLMDeployment, pools: Iterable[InstancePool]) -> bool:
    """Whether all instances were scaled to 0 because no requests came."""
    counts = [pool.spec.replicas for pool in pools]
    return deployment.spec.scaling.idle_s is not None and bool(counts) and not any(counts)


def compute_counts(view: DeploymentView, written: Manifest) -> ReplicaCounts:
    """Compute the instances of each role from `status.plan`; the present ones if it cannot be
    read, because a later version of Cleave wrote it."""
    spec, now = view.deployment.spec, count_engines(view.pools)
    try:
        plan = SelectedPlan.read_status(written)
    except ValueError:
        return now
    scaling = spec.scaling
    if any(pool.spec.owner is not ReplicasOwner.PLAN for pool in view.pools):
        # Scaling to 0 would stop the plan's pools only, and those of other owners would idle.
        scaling = scaling.model_copy(update={"idle_s": None})
    demand = view.demand
    if demand is not None:
        are_cells = any(pool.spec.members for pool in view.pools)
        roles = [Role.MIXED] if are_cells else [pool.role for pool in plan.pools]
        served_s = _compute_served_s(view, roles)
        demand = replace(demand, idle_s=min(demand.idle_s, served_s))
    at_least = compute_scheduled_rate(scaling.schedule, view.now_s)
    limits = [each for each in (spec.planning.max_gpus, view.max_gpus) if each is not None]
    max_gpus = min(limits, default=None)
    return scale(scaling, plan, now, demand, min_rate=at_least, max_gpus=max_gpus)


def count_engines(pools: Iterable[InstancePool]) -> ReplicaCounts:
    """The engines of each role that the pools have when complete; a cell has those of its
    members."""
    counts: Counter[Role] = Counter()
    for pool in pools:
        each_has = {each.role: each.replicas for each in pool.spec.members} or {pool.spec.role: 1}
        counts.update({role: pool.spec.replicas * count for role, count in each_has.items()})
    return counts


def count_instances(pool: InstancePool, counts: ReplicaCounts) -> int:
    """The replicas of a pool for these engines of each role; cells are never incomplete."""
    if not pool.spec.members:
        return counts.get(pool.spec.role, pool.spec.replicas)
    return max(-(-counts.get(each.role, 0) // each.replicas) for each in pool.spec.members)


def _compute_served_s(view: DeploymentView, roles: Collection[Role]) -> float:
    """Seconds for which every role has had a ready instance. A client may have given up while
    instances started: they stay long enough for a retry."""
    since = dict.fromkeys(roles, math.inf)
    for pod in view.pods:
        if pod.ready and not pod.deleting and pod.role in since:
            since[pod.role] = min(since[pod.role], pod.ready_s or 0.0)
    return max(view.now_s - max(since.values(), default=math.inf), 0.0)


def compute_scheduled_rate(schedule: Iterable[ScheduledPeak], now_s: float) -> float:
    """Return the highest rate of the scheduled peaks that are active now; 0: none is."""
    # Search backwards from the next second, to find a start at or before now.
    now = datetime.fromtimestamp(int(now_s) + 1, UTC)
    return max((peak.rate for peak in schedule if _is_active(peak, now)), default=0.0)


def _is_active(peak: ScheduledPeak, now: datetime) -> bool:
    began = next(CronSim(peak.cron, now, reverse=True))
    return (now - began).total_seconds() <= peak.duration_s


def scale(
    scaling: Scaling,
    plan: SelectedPlan,
    now: ReplicaCounts,
    demand: TrafficDemand | None,
    *,
    min_rate: float = 0.0,
    max_gpus: int | None = None,
) -> ReplicaCounts:
    """Compute the instances of each role of the plan.

    `now`: those of its pools; empty: there are no pools yet. `min_rate`: rate of an active
    scheduled peak, in req/s.
    """
    if min_rate:
        scaling = scaling.model_copy(update={"idle_s": None})
        observed = demand or TrafficDemand(0.0, None, 0.0, 0.0)
        peak = None if observed.peak is None else max(observed.peak, min_rate)
        demand = replace(observed, rate=max(observed.rate, min_rate), peak=peak)
    planned = {pool.role: pool.replicas for pool in plan.pools}
    is_asleep = bool(now) and not any(now.get(role, 0) for role in planned)
    if _should_scale_to_zero(scaling, demand, is_asleep):
        return dict.fromkeys(planned, 0)
    if plan.growth is None or not scaling.roles:
        return planned
    current = {role: now.get(role, count) for role, count in planned.items()}
    if demand is None:
        return {role: max(count, 1) for role, count in current.items()} if is_asleep else current

    def at(rate: float) -> ReplicaCounts:
        return _fit_to_gpus(scaling, plan, rate, max_gpus)

    # A short calm_s averages fewer requests, so the lowest meaningful rate is higher.
    lowest_rate = plan.growth.lowest_rate * HEARTBEAT_S / scaling.calm_s
    needed, peak = at(demand.rate), demand.peak
    enough = current if peak is None else at(max(peak, min(lowest_rate, _get_planned_rate(plan))))
    return {role: max(needed[role], min(count, enough[role])) for role, count in current.items()}


def compute_replicas(scaling: Scaling, plan: SelectedPlan, rate: float) -> ReplicaCounts:
    """Compute the instances of each role that a rate needs, within the bounds of scaled roles.

    Eq. 7 of Aladdin counts workers: the smallest part of the plan with its proportion of roles.
    Between two whole workers a role takes its fraction of one, plus half a worker for the error of
    the line; a rate that the plan itself serves never takes more than the plan.
    """
    planned = {pool.role: pool.replicas for pool in plan.pools}
    growth = plan.growth
    if growth is None:
        return planned
    law = WorkerLaw(growth.per_rate, growth.base, growth.lowest_rate)
    whole_workers = law.compute_workers(rate)
    workers = min(whole_workers, law.compute_fraction(rate) + 0.5)
    if any(pool.per_cell for pool in plan.pools):
        workers = whole_workers
    if rate <= _get_planned_rate(plan):
        workers = min(workers, growth.workers)
    bounds = {each.role: each for each in scaling.roles}
    counts = {}
    for role, count in planned.items():
        needed = max(1, math.ceil(count / growth.workers * workers - 1e-9))
        bound = bounds.get(role)
        in_bounds = bound and min(max(needed, bound.min_replicas), bound.max_replicas)
        counts[role] = in_bounds or count
    return counts


def _fit_to_gpus(
    scaling: Scaling, plan: SelectedPlan, rate: float, max_gpus: int | None
) -> ReplicaCounts:
    """Instances for the highest rate, up to this one, that the GPUs suffice for."""
    sizes = {pool.role: pool.parallelism.gpus for pool in plan.pools}
    lowest_rate = max(_get_planned_rate(plan), _MIN_RATE)
    while True:
        counts = compute_replicas(scaling, plan, rate)
        gpus = sum(count * sizes[role] for role, count in counts.items())
        if max_gpus is None or gpus <= max_gpus or rate <= lowest_rate:
            return counts
        rate = max(0.95 * rate, lowest_rate)


def _get_planned_rate(plan: SelectedPlan) -> float:
    """Goodput of the plan as it is, in req/s."""
    return plan.predicted.goodput if plan.predicted else 0.0


def _should_scale_to_zero(scaling: Scaling, demand: TrafficDemand | None, is_asleep: bool) -> bool:
    if scaling.idle_s is None:
        return False
    if demand is None:
        return is_asleep
    if demand.in_flight:
        return False
    return is_asleep or demand.idle_s >= scaling.idle_s
