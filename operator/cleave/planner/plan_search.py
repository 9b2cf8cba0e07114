"""`plan`, the entry point of the planner: ranked plans and a verdict for one `Problem`.

Called by the command line, `cleave up`, the operator, notebooks and benchmarks. 1. List the
instances on which the model fits. 2. Every algorithm lists placements that serve the rate in short
trials. 3. Predict the best of them in long trials. 4. Rank them and explain the result.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cleave.api.planning import Objective
from cleave.planner.placement import PlanError
from cleave.planner.plan import NearestSlo, PlanningResult, PlanVerdict
from cleave.planner.problem import Problem
from cleave.planner.result import md1_crosscheck, verdict
from cleave.planner.result.nearest_slo import find_nearest_slo
from cleave.planner.result.prediction import PredictedPlan, predict
from cleave.planner.result.text import format_plan
from cleave.planner.result.verdict import Ranking
from cleave.planner.search import affinity, enumeration
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell_fleet,
)
from cleave.planner.search.candidates import Candidate, list_candidates, list_sizes
from cleave.planner.search.enumeration import PlacementOption
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials

PlanProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, total steps and a text for the current step."""

_MAX_DISAGGREGATED = 3
"""Number of disaggregated placements that are predicted in long trials."""


@dataclass(slots=True)
class _ProgressMeter:
    """Reports progress; the total is an estimate that `done` never reaches."""

    progress: PlanProgressCallback | None
    total: int
    done: int = 0

    def tick(self, text: str) -> None:
        """Report one more step."""
        self.done = min(self.done + 1, self.total - 1)
        if self.progress:
            self.progress(self.done, self.total, text)


def plan(problem: Problem, progress: PlanProgressCallback | None = None) -> PlanningResult:
    """Search ranked plans for `problem`.

    Raises PlanError when the model fits on no instance that the GPUs allow, or when the price or
    power that the objective needs is unknown.
    """
    started = time.perf_counter()
    feasible = _list_candidates(problem)
    targets = Targets.from_slo(problem.slo)
    trials = Trials(problem.demand, problem.seed)
    meter = _ProgressMeter(progress, total=8 * len(feasible) + 20)
    choice = affinity.choose_affinity(problem, trials, feasible)
    options = enumeration.enumerate_placements(
        problem, trials, feasible, targets, choice.affinity, meter.tick
    )
    finalists = _predict_best(problem, trials, options, targets, meter)
    ranking = verdict.rank_plans(problem, finalists, targets)
    explanation = (
        _explain_infeasible(problem, trials, feasible, targets, ranking, meter)
        if ranking.verdict is PlanVerdict.INFEASIBLE
        else _explain_selection(problem, trials, ranking, targets, choice.reason)
    )
    plans = [each.plan for each in ranking.ordered]
    return PlanningResult(
        verdict=ranking.verdict,
        selected=None if ranking.verdict is PlanVerdict.INFEASIBLE else plans[0],
        alternatives=tuple(plans if ranking.verdict is PlanVerdict.INFEASIBLE else plans[1:]),
        reason=explanation.reason,
        what_would_change=explanation.what_would_change,
        nearest_slo=explanation.nearest_slo,
        warnings=_list_warnings(problem, finalists),
        num_candidates=len(feasible),
        num_simulated_requests=trials.tally.requests,
        elapsed_s=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Explanation:
    reason: str
    what_would_change: str
    nearest_slo: NearestSlo | None = None


def _list_candidates(problem: Problem) -> tuple[Candidate, ...]:
    feasible = list_candidates(problem)
    if not feasible:
        raise PlanError([f"spec.model: {_explain_no_candidate(problem)}"])
    objective = problem.planning.objective
    unknown = {each.supply.gpu for each in feasible if not each.get_resources(objective) > 0}
    if unknown:
        missing = "price" if objective is Objective.COST else "power"
        fault = (
            f"spec.planning.objective: {objective.value} needs the {missing} of "
            f"{', '.join(sorted(unknown))}; set it, or choose GoodputPerGPU"
        )
        raise PlanError([fault])
    return feasible


def _explain_no_candidate(problem: Problem) -> str:
    """Why the largest possible instance does not run the model: it comes closest to fitting."""
    reasons = [
        reason
        for supply in problem.supplies
        for size in sorted(list_sizes(problem, supply), key=math.prod, reverse=True)
        if (reason := problem.estimator.explain_unsupported(supply.gpu, *size)) is not None
    ]
    fits_not = (reason for reason in reasons if "does not fit" in reason)
    return next(fits_not, next(iter(reasons), "there are no GPUs"))


def _predict_best(
    problem: Problem,
    trials: Trials,
    options: Sequence[PlacementOption],
    targets: Targets,
    meter: _ProgressMeter,
) -> list[PredictedPlan]:
    """Predict the most promising placements, the best of each kind among them."""
    objective = problem.planning.objective
    ordered = sorted(
        options, key=lambda each: (not each.holds_rate, each.placement.get_resources(objective))
    )
    disaggregated = [each for each in ordered if each.placement.is_disaggregated]
    if disaggregated:
        max_resources = enumeration.MAX_RESOURCE_RATIO * disaggregated[0].placement.get_resources(
            objective
        )
        disaggregated = [
            each
            for each in disaggregated[:_MAX_DISAGGREGATED]
            if each.placement.get_resources(objective) <= max_resources
        ]
    colocated = [each for each in ordered if not each.placement.is_disaggregated][:1]
    finalists = []
    for each in (*disaggregated, *colocated):
        meter.tick("predictions")
        long = trials.with_precision(CONFIRMATION_PRECISION)
        finalists.append(predict(problem, long, each.placement, targets, each.algorithm))
    return finalists


def _explain_selection(
    problem: Problem, trials: Trials, ranking: Ranking, targets: Targets, why_affinity: str
) -> _Explanation:
    switch_ms = None
    if ranking.verdict is PlanVerdict.DISAGGREGATE:
        switch_ms = _compute_switch_tpot_ms(problem, trials, ranking, targets)
    return _Explanation(
        verdict.explain_selection(problem, ranking, targets, why_affinity),
        verdict.describe_runner_up(problem, ranking, targets, switch_ms),
    )


def _compute_switch_tpot_ms(
    problem: Problem, trials: Trials, ranking: Ranking, targets: Targets
) -> float | None:
    """TPOT target at which colocated instances need no more resources than the selected plan."""
    other = verdict.find_rival(ranking)
    if other is None:
        return None
    objective = problem.planning.objective
    group = other.placement.groups[0]
    each = group.instance.candidate.get_resources(objective)
    replicas = int(ranking.ordered[0].placement.get_resources(objective) / each)
    if replicas == 0:
        return None
    placement = CandidatePlacement((InstanceGroup(group.role, group.instance, replicas),))
    span = trials.compute_span(problem.rate, targets)
    outcome = trials.simulate(build_cell_fleet(problem, placement), problem.rate, span)
    return verdict.compute_min_tpot_ms(outcome, span, targets)


def _explain_infeasible(
    problem: Problem,
    trials: Trials,
    feasible: Sequence[Candidate],
    targets: Targets,
    ranking: Ranking,
    meter: _ProgressMeter,
) -> _Explanation:
    meter.tick("the nearest SLO")
    nearest = find_nearest_slo(problem, trials, feasible, targets)
    return _Explanation(
        verdict.explain_infeasible(problem, ranking, nearest, targets),
        verdict.describe_remedies(problem, ranking, nearest),
        nearest,
    )


def _list_warnings(problem: Problem, finalists: Sequence[PredictedPlan]) -> tuple[str, ...]:
    return (
        *problem.notes,
        *(warning for each in finalists for warning in _list_simulation_warnings(each)),
        *(warning for each in finalists[:1] for warning in md1_crosscheck.list_disagreements(each)),
    )


def _list_simulation_warnings(finalist: PredictedPlan) -> Iterator[str]:
    name = format_plan(finalist.plan)
    if not finalist.is_monotone:
        yield (
            f"{name}: attainment does not fall steadily with the rate; its goodput is the lowest "
            "rate above which the target is missed"
        )
    if finalist.placement.copies > 1:
        yield (
            f"{name}: simulated as one of {finalist.placement.copies} equal cells at its share of "
            "the rate; behind one dispatcher they serve at least as much"
        )
