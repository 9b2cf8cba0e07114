"""How many instances of each role run now, while the plan stays the same. Pure.

Called by the deployment's reconcile. What is hard: nothing is remembered here. How many there are
now is what the pools say, and how calm it has been is what the gateways counted: an operator that
starts anew lets instances come at once, and go only when it has watched long enough itself.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from cronsim import CronSim

from cleave.api.deployment import LLMDeployment
from cleave.api.planned import SelectedPlan
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.api.role import Role
from cleave.api.scaling import Peak, Scaling
from cleave.planner.growth import HEARTBEAT_S
from cleave.pods.labels import Manifest
from cleave.traffic.window import Window

if TYPE_CHECKING:
    from cleave.controller.deployment import DeploymentView

Counts = Mapping[Role, int]

_LEAST_RATE = 0.001
"""In req/s: nothing less is told apart from it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the gateways have told of late."""

    rate: float
    """Requests per second of the last minute."""
    peak: float | None
    """The highest rate of any minute of `Scaling.calm_s`; None: not watched for so long."""
    in_flight: float
    """Requests that wait or run now."""
    quiet_s: float
    """Since the last request, as far as this operator has watched."""


def measure(
    windows: Sequence[Window], calm_s: float, *, in_flight: float, quiet_s: float
) -> Demand | None:
    """From windows of traffic, oldest first; None: there is none yet, and nothing waits."""
    if not windows:
        return Demand(0.0, None, in_flight, quiet_s) if in_flight else None
    rates = list(_rates(windows))
    begins = windows[-1].end_s - calm_s
    is_watched = windows[0].start_s <= begins
    late = [rate for rate, each in zip(rates, windows, strict=True) if each.end_s > begins]
    return Demand(rates[-1], max(late) if is_watched else None, in_flight, quiet_s)


def _rates(windows: Sequence[Window]) -> Iterator[float]:
    """For each window the rate of the minute that ends with it."""
    minute: deque[Window] = deque()
    for window in windows:
        minute.append(window)
        while sum(each.length_s for each in minute) - minute[0].length_s >= HEARTBEAT_S:
            minute.popleft()
        requests = sum(each.num_requests for each in minute)
        yield requests / sum(each.length_s for each in minute)


def watches(deployment: LLMDeployment) -> bool:
    """Whether instances follow traffic."""
    terms = deployment.spec.scaling
    return bool(terms.roles) or terms.idle_s is not None


def is_asleep(deployment: LLMDeployment, pools: Iterable[InstancePool]) -> bool:
    """Whether all instances have gone for want of requests."""
    counts = [pool.spec.replicas for pool in pools]
    return deployment.spec.scaling.idle_s is not None and bool(counts) and not any(counts)


def find_counts(view: "DeploymentView", written: Manifest) -> Counts:
    """Instances of each role now, by the plan that `status.plan` tells of.

    Raises ValueError when it is not readable.
    """
    plan = SelectedPlan.model_validate(written, by_alias=True)
    spec, now = view.deployment.spec, {pool.spec.role: pool.spec.replicas for pool in view.pools}
    terms = spec.scaling
    if any(pool.spec.owner is not ReplicasOwner.PLAN for pool in view.pools):
        # A part of the deployment would sleep, and the rest wait for it.
        terms = terms.model_copy(update={"idle_s": None})
    demand = view.demand
    if demand is not None:
        served_s = _find_served_s(view, [pool.role for pool in plan.pools])
        demand = replace(demand, quiet_s=min(demand.quiet_s, served_s))
    at_least = find_peak(terms.schedule, view.now_s)
    max_gpus = spec.planning.max_gpus
    return scale(terms, plan, now, demand, at_least=at_least, max_gpus=max_gpus)


def _find_served_s(view: "DeploymentView", roles: Collection[Role]) -> float:
    """For how long there has been an instance of every role that was ready.

    Whoever asked may have given up while they started; they stay long enough for a second try.
    """
    since = dict.fromkeys(roles, math.inf)
    for pod in view.pods:
        if pod.ready and not pod.deleting and pod.role in since:
            since[pod.role] = min(since[pod.role], pod.ready_s or 0.0)
    return max(view.now_s - max(since.values(), default=math.inf), 0.0)


def find_peak(schedule: Iterable[Peak], now_s: float) -> float:
    """The highest rate of the known peaks that last now; 0: none does."""
    # Back from the next second on: what is looked for is at or before now.
    now = datetime.fromtimestamp(int(now_s) + 1, UTC)
    return max((peak.rate for peak in schedule if _lasts(peak, now)), default=0.0)


def _lasts(peak: Peak, now: datetime) -> bool:
    begun = next(CronSim(peak.cron, now, reverse=True))
    return (now - begun).total_seconds() <= peak.duration_s


def scale(
    terms: Scaling,
    plan: SelectedPlan,
    now: Counts,
    demand: Demand | None,
    *,
    at_least: float = 0.0,
    max_gpus: int | None = None,
) -> Counts:
    """Instances of each role of the plan.

    `now`: those that its pools have; empty: there are no pools yet. `at_least`: the rate that a
    known peak may have now, in req/s.
    """
    if at_least:
        terms = terms.model_copy(update={"idle_s": None})
        seen = demand or Demand(0.0, None, 0.0, 0.0)
        peak = None if seen.peak is None else max(seen.peak, at_least)
        demand = replace(seen, rate=max(seen.rate, at_least), peak=peak)
    planned = {pool.role: pool.replicas for pool in plan.pools}
    is_asleep = bool(now) and not any(now.get(role, 0) for role in planned)
    if _sleeps(terms, demand, is_asleep):
        return dict.fromkeys(planned, 0)
    if plan.growth is None or not terms.roles:
        return planned
    there = {role: now.get(role, count) for role, count in planned.items()}
    if demand is None:
        return {role: max(count, 1) for role, count in there.items()} if is_asleep else there

    def at(rate: float) -> Counts:
        return _fitting(terms, plan, rate, max_gpus)

    # So short a calm says less about lengths than a longer one would.
    least = plan.growth.lowest_rate * HEARTBEAT_S / terms.calm_s
    needed, peak = at(demand.rate), demand.peak
    enough = there if peak is None else at(max(peak, min(least, _planned_rate(plan))))
    return {
        role: max(needed[role], min(count, max(enough[role], needed[role])))
        for role, count in there.items()
    }


def sized(terms: Scaling, plan: SelectedPlan, rate: float) -> Counts:
    """Instances of each role that a rate needs, within the bounds of the roles that scale.

    Eq. 7 counts workers: the smallest part of the plan with its proportion of roles. Between two
    whole workers a role takes its part of one, plus half a worker for what the line leaves out;
    what the plan itself was found to serve never takes more than the plan.
    """
    planned = {pool.role: pool.replicas for pool in plan.pools}
    growth = plan.growth
    if growth is None:
        return planned
    line = max(growth.per_rate * rate + growth.base - 1e-9, 0.0)
    whole = max(1, math.ceil(line))
    workers = min(whole, line + 0.5)
    if any(pool.per_cell for pool in plan.pools):
        workers = whole
    if rate <= _planned_rate(plan):
        workers = min(workers, growth.workers)
    bounds = {each.role: each for each in terms.roles}
    counts = {}
    for role, count in planned.items():
        wanted = max(1, math.ceil(count / growth.workers * workers - 1e-9))
        bound = bounds.get(role)
        in_bounds = bound and min(max(wanted, bound.min_replicas), bound.max_replicas)
        counts[role] = in_bounds or count
    return counts


def _fitting(terms: Scaling, plan: SelectedPlan, rate: float, max_gpus: int | None) -> Counts:
    """What the highest rate up to this one needs for which there are GPUs."""
    sizes = {pool.role: pool.parallelism.gpus for pool in plan.pools}
    least = max(_planned_rate(plan), _LEAST_RATE)
    while True:
        counts = sized(terms, plan, rate)
        gpus = sum(count * sizes[role] for role, count in counts.items())
        if max_gpus is None or gpus <= max_gpus or rate <= least:
            return counts
        rate = max(0.95 * rate, least)


def _planned_rate(plan: SelectedPlan) -> float:
    """What the plan as it is was found to serve."""
    return plan.predicted.goodput if plan.predicted else 0.0


def _sleeps(terms: Scaling, demand: Demand | None, is_asleep: bool) -> bool:
    if terms.idle_s is None:
        return False
    if demand is None:
        return is_asleep
    if demand.in_flight:
        return False
    return is_asleep or demand.quiet_s >= terms.idle_s
