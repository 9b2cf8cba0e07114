"""What engines that keep targets (`engine.scheduling`) would serve with a plan's instances.

For `cleave plan --explain`; the plan itself is for the engines that the deployment configures.
"""

from dataclasses import dataclass, replace

from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.goodput import find_goodput_near
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import Admission, Batching, PrefillOrder

OVERLOAD = 1.5
"""Times the plan's goodput at which both are compared."""


@dataclass(frozen=True, slots=True)
class TargetsWorth:
    """The same instances with the configured engines and with those that keep targets."""

    goodput: float
    """Rate within the SLO with the configured ones, in req/s; by short trials, as the next."""
    goodput_kept: float
    overload_attainment: float
    """Share of the requests within both targets at OVERLOAD times `goodput`."""
    overload_attainment_kept: float


def measure_worth_of_targets(problem: Problem, plan: Plan) -> TargetsWorth | None:
    """Simulate the plan's instances with both; None: the engines keep targets already, or batch by
    rules with which vLLM does not run, or no rate is within the SLO."""
    policies = problem.policies
    kept = replace(policies, order=PrefillOrder.IN_TIME, admission=Admission.WITHIN_TPOT)
    if policies == kept or any(pool.batching != Batching.VLLM.name for pool in plan.pools):
        return None
    trials, targets = Trials(problem.demand, problem.seed), Targets.from_slo(problem.slo)
    fleets, copies = [], 1
    for each in (policies, kept):
        own = replace(problem, policies=each).with_connector(plan.connector)
        placement = to_candidate_placement(own, plan.pools, plan.algorithm)
        fleets.append(build_cell(own, placement))
        copies = placement.copies
    guess = plan.prediction.goodput / copies
    goodputs = [find_goodput_near(trials, fleet, targets, guess).rate for fleet in fleets]
    if not goodputs[0]:
        return None
    rate = OVERLOAD * goodputs[0]
    span = trials.compute_span(rate, targets)
    shares = [trials.measure_shares(fleet, rate, targets, span).both for fleet in fleets]
    return TargetsWorth(*(rate * copies for rate in goodputs), *shares)
