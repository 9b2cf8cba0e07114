"""`plan`, the entry point of the planner: ranked plans and a verdict for one `Problem`.

Called by the command line, `cleave up`, the operator, notebooks and benchmarks. 1. List the
instances on which the model fits. 2. Every algorithm lists placements that serve the rate in short
trials. 3. Predict the best of them in long trials. 4. Rank them and explain the result.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from cleave.api.planning import Objective
from cleave.perf.hardware.memory import NO_ROOM
from cleave.planner.placement import PlanError
from cleave.planner.plan import PlanningResult, PlanVerdict, ReuseWorth
from cleave.planner.problem import Problem
from cleave.planner.result import md1, verdict
from cleave.planner.result.margins import list_close_calls
from cleave.planner.result.nearest_slo import find_nearest_slo
from cleave.planner.result.prediction import PredictedPlan, predict, resample
from cleave.planner.result.reuse import compare_with_blind, estimate_host_memory
from cleave.planner.result.text import format_number, format_plan
from cleave.planner.result.verdict import Ranking
from cleave.planner.search import affinity, enumeration
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    build_cell,
    to_planned_pools,
)
from cleave.planner.search.candidates import (
    Candidate,
    explain_unsupported,
    list_candidates,
    list_short_of_room,
    list_sizes,
)
from cleave.planner.search.context import SearchContext
from cleave.planner.search.enumeration import PlacementOption
from cleave.planner.search.goodput import TOLERANCE
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Trials

PlanProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, total steps and a text for the current step."""


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
    feasible = list_feasible(problem)
    meter = _ProgressMeter(progress, total=8 * len(feasible) + 20)
    search = replace(SearchContext.from_problem(problem), tick=meter.tick)
    choice = affinity.choose_affinity(search, feasible)
    finalists = _predict_best(
        search, enumeration.enumerate_placements(search, feasible, choice.affinity)
    )
    ranking = _sample_first(search, verdict.rank_plans(problem, finalists))
    plans, nearest, reuse = [each.plan for each in ranking.ordered], None, None
    warnings = _list_warnings(problem, finalists, search.trials.max_rate)
    if is_infeasible := ranking.verdict is PlanVerdict.INFEASIBLE:
        search.tick("the nearest SLO")
        nearest = find_nearest_slo(search, feasible)
        reason = verdict.explain_infeasible(problem, ranking, nearest)
        change = verdict.describe_remedies(problem, ranking, nearest)
    else:
        switch_ms = _compute_switch_ms(search, ranking)
        reason = verdict.explain_selection(problem, ranking, choice.reason)
        change = verdict.describe_runner_up(problem, ranking, switch_ms)
        best = ranking.ordered[0]
        warnings = *list_close_calls(problem, best, search.close_calls), *warnings
        reuse = _explain_reuse(search, feasible, best) if problem.demand.has_reuse else None
    return PlanningResult(
        verdict=ranking.verdict,
        selected=None if is_infeasible else plans[0],
        alternatives=tuple(plans if is_infeasible else plans[1:]),
        reason=reason,
        what_would_change=change,
        nearest_slo=nearest,
        warnings=warnings,
        num_candidates=len(feasible),
        num_simulated_requests=search.trials.tally.requests,
        elapsed_s=time.perf_counter() - started,
        reuse=reuse,
    )


def _explain_reuse(
    search: SearchContext, feasible: Sequence[Candidate], best: PredictedPlan
) -> ReuseWorth:
    """What prompts that repeat save the selected plan."""
    blind = _find_smallest_blind(search, feasible, best.placement)
    pools = None if blind is None else to_planned_pools(blind)
    has_own, host_memory = search.problem.policies.kv_offloading_gib is not None, None
    if not has_own:
        host_memory = estimate_host_memory(best.placement, best.trace, best.span.warmup)
    return compare_with_blind(best.plan, pools, host_memory, has_host_memory=has_own)


def list_feasible(problem: Problem) -> tuple[Candidate, ...]:
    """The instances on which the model fits, at least one; `cleave validate` simulates no more.
    Raises PlanError as `plan`."""
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


def _find_smallest_blind(
    search: SearchContext, feasible: Sequence[Candidate], selected: CandidatePlacement
) -> CandidatePlacement | None:
    """The smallest placement for the same requests if no prompt repeated, disaggregated like
    `selected` where equal ones are; None: none serves them. It is not predicted, which takes most
    of the time of a plan: the search's own trials are enough to compare sizes."""
    problem = replace(search.problem, demand=search.problem.demand.without_reuse())
    trials = Trials(problem.demand, problem.seed, tally=search.trials.tally)
    blind = replace(search, problem=problem, trials=trials, close_calls=[])
    blind.tick("what reuse is worth")
    chosen = affinity.choose_affinity(blind, feasible).affinity
    options = enumeration.enumerate_placements(blind, feasible, chosen)
    return min(
        (option.placement for option in options if option.holds_rate),
        key=lambda each: (
            search.get_resources(each),
            each.is_disaggregated is not selected.is_disaggregated,
        ),
        default=None,
    )


def _explain_no_candidate(problem: Problem) -> str:
    """Why the largest possible instance does not run the model: it comes closest to fitting."""
    reasons = [
        reason
        for supply in problem.supplies
        for size in sorted(list_sizes(problem, supply), key=lambda each: each.gpus, reverse=True)
        if (reason := explain_unsupported(problem, supply.gpu, size)) is not None
    ]
    for reason in reasons:
        if "does not fit" in reason:
            remedy = "the largest possible instance needs more or larger GPUs, or weights of 8 bits"
            if NO_ROOM in reason:
                remedy = f"{remedy}, or set a smaller spec.model.maxModelLen"
            return f"{reason}; {remedy}"
    return next(iter(reasons), "there are no GPUs")


def _predict_best(search: SearchContext, options: Sequence[PlacementOption]) -> list[PredictedPlan]:
    """Predict all placements, those that need least first."""
    get_resources = search.get_resources
    ordered = sorted(options, key=lambda each: (not each.holds_rate, get_resources(each.placement)))
    finalists = []
    for each in ordered:
        search.tick("predictions")
        long = search.with_precision(CONFIRMATION_PRECISION)
        finalists.append(predict(long, each.placement, each.algorithm))
    return finalists


def _sample_first(search: SearchContext, ranking: Ranking) -> Ranking:
    """With a better prediction of the plan that is selected, which takes too long for all."""
    if ranking.verdict is PlanVerdict.INFEASIBLE:
        return ranking
    search.tick("the selected plan")
    first, *others = ranking.ordered
    return replace(ranking, ordered=(resample(search, first), *others))


def _compute_switch_ms(search: SearchContext, ranking: Ranking) -> dict[str, float] | None:
    """Targets at which colocated instances need no more than a selected disaggregated plan; None:
    they already need no more, or one of them takes more."""
    other = verdict.find_rival(ranking)
    if ranking.verdict is not PlanVerdict.DISAGGREGATE or other is None:
        return None
    problem, trials, group = search.problem, search.trials, other.placement.groups[0]
    each = group.instance.candidate.get_resources(problem.planning.objective)
    replicas = int(search.get_resources(ranking.ordered[0].placement) / each)
    if replicas == 0 or replicas >= group.replicas * other.placement.copies:
        return None
    fleet = build_cell(problem, CandidatePlacement((replace(group, replicas=replicas),)))
    span = trials.compute_span(problem.rate, search.targets)
    outcome = trials.simulate(fleet, problem.rate, span)
    return verdict.compute_switch_ms(outcome, span, problem.slo)


def _list_warnings(
    problem: Problem, finalists: Sequence[PredictedPlan], max_rate: float
) -> tuple[str, ...]:
    return (
        *problem.notes,
        *list_short_of_room(problem),
        *(warning for each in finalists for warning in _list_simulation_warnings(problem, each)),
        *_list_rate_warnings(finalists, max_rate),
        *(warning for each in finalists[:1] for warning in md1.list_disagreements(each)),
    )


def _list_rate_warnings(finalists: Sequence[PredictedPlan], max_rate: float) -> Iterator[str]:
    near = [
        format_plan(each.plan)
        for each in finalists
        if each.plan.prediction.goodput > max_rate * each.placement.copies * (1 - 2 * TOLERANCE)
    ]
    if near:
        yield (
            f"{', '.join(dict.fromkeys(near))}: may serve more than shown, as no rate above "
            f"{format_number(max_rate)} req/s was tried"
        )


def _list_simulation_warnings(problem: Problem, finalist: PredictedPlan) -> Iterator[str]:
    name, placement = format_plan(finalist.plan), finalist.placement
    if problem.policies.flipping and placement.is_disaggregated and placement.has_ranks:
        yield f"{name}: not simulated: instances of data-parallel ranks that change roles"
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
