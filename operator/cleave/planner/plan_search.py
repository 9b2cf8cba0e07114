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
from cleave.planner.plan import Answer, NearestSlo, Verdict
from cleave.planner.problem import Problem
from cleave.planner.result import md1_crosscheck, verdict
from cleave.planner.result.nearest_slo import nearest_slo
from cleave.planner.result.prediction import Finalist, predict
from cleave.planner.result.text import plan_label
from cleave.planner.result.verdict import Ranking
from cleave.planner.search import affinity, enumeration
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet
from cleave.planner.search.candidates import Candidate, candidates, sizes
from cleave.planner.search.enumeration import Found
from cleave.planner.search.trials import CONFIRMED, Targets, Trials

Progress = Callable[[int, int, str], None]
"""Called with steps done, total steps and a text for the current step."""

_MOST_SPLIT = 3
"""Number of disaggregated placements that are predicted in long trials."""


@dataclass(slots=True)
class _Meter:
    """Reports progress; the total is an estimate that `done` never reaches."""

    progress: Progress | None
    total: int
    done: int = 0

    def tick(self, text: str) -> None:
        """Report one more step."""
        self.done = min(self.done + 1, self.total - 1)
        if self.progress:
            self.progress(self.done, self.total, text)


def plan(problem: Problem, progress: Progress | None = None) -> Answer:
    """Search ranked plans for `problem`.

    Raises PlanError when the model fits on no instance that the GPUs allow, or when the price or
    power that the objective needs is unknown.
    """
    started = time.perf_counter()
    feasible = _candidates(problem)
    targets = Targets.of(problem.slo)
    trials = Trials(problem.demand, problem.seed)
    meter = _Meter(progress, total=8 * len(feasible) + 20)
    choice = affinity.choose(problem, trials, feasible)
    options = enumeration.drafts(problem, trials, feasible, targets, choice.affinity, meter.tick)
    finalists = _predicted(problem, trials, options, targets, meter)
    ranking = verdict.rank(problem, finalists, targets)
    explanation = (
        _infeasible(problem, trials, feasible, targets, ranking, meter)
        if ranking.verdict is Verdict.INFEASIBLE
        else _chosen(problem, trials, ranking, targets, choice.reason)
    )
    plans = [each.plan for each in ranking.ordered]
    return Answer(
        verdict=ranking.verdict,
        selected=None if ranking.verdict is Verdict.INFEASIBLE else plans[0],
        alternatives=tuple(plans if ranking.verdict is Verdict.INFEASIBLE else plans[1:]),
        reason=explanation.reason,
        what_would_change=explanation.what_would_change,
        nearest_slo=explanation.nearest_slo,
        warnings=_warnings(problem, finalists),
        num_candidates=len(feasible),
        num_simulated_requests=trials.tally.requests,
        elapsed_s=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Said:
    reason: str
    what_would_change: str
    nearest_slo: NearestSlo | None = None


def _candidates(problem: Problem) -> tuple[Candidate, ...]:
    feasible = candidates(problem)
    if not feasible:
        raise PlanError([f"spec.model: {_why_none(problem)}"])
    objective = problem.planning.objective
    unknown = {each.supply.gpu for each in feasible if not each.resources(objective) > 0}
    if unknown:
        missing = "price" if objective is Objective.COST else "power"
        fault = (
            f"spec.planning.objective: {objective.value} needs the {missing} of "
            f"{', '.join(sorted(unknown))}; set it, or choose GoodputPerGPU"
        )
        raise PlanError([fault])
    return feasible


def _why_none(problem: Problem) -> str:
    """Why the largest possible instance does not run the model: it comes closest to fitting."""
    reasons = [
        reason
        for supply in problem.supplies
        for size in sorted(sizes(problem, supply), key=math.prod, reverse=True)
        if (reason := problem.estimator.why_not(supply.gpu, *size)) is not None
    ]
    fits_not = (reason for reason in reasons if "does not fit" in reason)
    return next(fits_not, next(iter(reasons), "there are no GPUs"))


def _predicted(
    problem: Problem, trials: Trials, options: Sequence[Found], targets: Targets, meter: _Meter
) -> list[Finalist]:
    """Predict the most promising placements, the best of each kind among them."""
    objective = problem.planning.objective
    ordered = sorted(
        options, key=lambda each: (not each.is_enough, each.draft.resources(objective))
    )
    disaggregated = [each for each in ordered if each.draft.is_disaggregated]
    if disaggregated:
        max_resources = enumeration.WORTH_SHOWING * disaggregated[0].draft.resources(objective)
        disaggregated = [
            each
            for each in disaggregated[:_MOST_SPLIT]
            if each.draft.resources(objective) <= max_resources
        ]
    colocated = [each for each in ordered if not each.draft.is_disaggregated][:1]
    finalists = []
    for each in (*disaggregated, *colocated):
        meter.tick("predictions")
        long = trials.at(CONFIRMED)
        finalists.append(predict(problem, long, each.draft, targets, each.algorithm))
    return finalists


def _chosen(
    problem: Problem, trials: Trials, ranking: Ranking, targets: Targets, why_affinity: str
) -> _Said:
    switch_ms = None
    if ranking.verdict is Verdict.DISAGGREGATE:
        switch_ms = _switch_tpot_ms(problem, trials, ranking, targets)
    return _Said(
        verdict.reason(problem, ranking, targets, why_affinity),
        verdict.what_would_change(problem, ranking, targets, switch_ms),
    )


def _switch_tpot_ms(
    problem: Problem, trials: Trials, ranking: Ranking, targets: Targets
) -> float | None:
    """TPOT target at which colocated instances need no more resources than the selected plan."""
    other = verdict.rival(ranking)
    if other is None:
        return None
    objective = problem.planning.objective
    group = other.draft.groups[0]
    each = group.instance.candidate.resources(objective)
    replicas = int(ranking.ordered[0].draft.resources(objective) / each)
    if replicas == 0:
        return None
    placement = Draft((Group(group.role, group.instance, replicas),))
    span = trials.span(problem.rate, targets)
    outcome = trials.serve(cell_fleet(problem, placement), problem.rate, span)
    return verdict.least_tpot_ms(outcome, span, targets)


def _infeasible(
    problem: Problem,
    trials: Trials,
    feasible: Sequence[Candidate],
    targets: Targets,
    ranking: Ranking,
    meter: _Meter,
) -> _Said:
    meter.tick("the nearest SLO")
    nearest = nearest_slo(problem, trials, feasible, targets)
    return _Said(
        verdict.infeasible(problem, ranking, nearest, targets),
        verdict.what_would_help(problem, ranking, nearest),
        nearest,
    )


def _warnings(problem: Problem, finalists: Sequence[Finalist]) -> tuple[str, ...]:
    return (
        *problem.notes,
        *(warning for each in finalists for warning in _doubts(each)),
        *(warning for each in finalists[:1] for warning in md1_crosscheck.disagreements(each)),
    )


def _doubts(finalist: Finalist) -> Iterator[str]:
    name = plan_label(finalist.plan)
    if not finalist.is_monotone:
        yield (
            f"{name}: attainment does not fall steadily with the rate; its goodput is the lowest "
            "rate above which the target is missed"
        )
    if finalist.draft.copies > 1:
        yield (
            f"{name}: simulated as one of {finalist.draft.copies} equal cells at its share of the "
            "rate; behind one dispatcher they serve at least as much"
        )
