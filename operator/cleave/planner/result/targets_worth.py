"""What engines that keep targets (`engine.scheduling`) would serve with a plan's instances.

For `cleave plan --explain`; the plan itself is for the engines that the deployment configures. What
is hard: near its goodput a fleet falls behind slowly, so only trials as long as those of the plan
show whether it keeps up.
"""

from dataclasses import dataclass, replace

from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import build_deployed_cell
from cleave.planner.search.goodput import Goodput, confirm_goodput
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials
from cleave.simulator.fleet import Admission, Batching, PrefillOrder

OVERLOAD = 1.5
"""Times the plan's goodput at which both are compared."""


@dataclass(frozen=True, slots=True)
class TargetsWorth:
    """The plan's instances with engines that keep targets."""

    goodput: float
    """Rate within the SLO, in req/s."""
    goodput_interval: tuple[float, float]
    """95 % confidence interval of `goodput`."""
    overload_attainment: float
    """Share of the requests within both targets at OVERLOAD times the plan's own goodput."""
    own_overload_attainment: float
    """The same with the engines of the plan."""


def measure_worth_of_targets(problem: Problem, plan: Plan) -> TargetsWorth | None:
    """Simulate the plan's instances as its prediction does; None: the engines keep targets already,
    batch by rules with which vLLM does not run, or serve no rate within the SLO."""
    policies, own_goodput = problem.policies, plan.prediction.goodput
    kept = replace(policies, order=PrefillOrder.IN_TIME, admission=Admission.WITHIN_TPOT)
    is_other = any(pool.batching != Batching.VLLM.name for pool in plan.pools)
    if policies == kept or is_other or own_goodput <= 0:
        return None
    trials = Trials(problem.demand, problem.seed, CONFIRMATION_PRECISION)
    targets, fleets = Targets.from_slo(problem.slo), []
    for each in (policies, kept):
        changed = replace(problem, policies=each)
        placement = to_candidate_placement(changed, plan.pools, plan.algorithm, plan.cells)
        fleets.append(build_deployed_cell(changed, placement, plan.whole_below_tokens))
    copies, guess = placement.copies, own_goodput / placement.copies
    found = confirm_goodput(trials, fleets[1], targets, Goodput(guess, 0.0))
    low, high = found.interval or (found.rate, found.rate)
    rate = OVERLOAD * guess
    span = trials.compute_span(rate, targets)
    own, others = (trials.measure_shares(fleet, rate, targets, span).both for fleet in fleets)
    return TargetsWorth(found.rate * copies, (low * copies, high * copies), others, own)
