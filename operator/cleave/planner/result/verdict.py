"""Ranks predicted plans and explains the verdict: disaggregate, colocate or infeasible.

Pure; it only reads the simulations of the predicted plans. What is hard: not to claim a gain that
another sample of requests would undo. Where two plans need the same resources and their confidence
intervals overlap, the simpler one is selected and the sentence says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cleave.api.planning import Disaggregation, Objective
from cleave.planner.plan import NearestSlo, Verdict
from cleave.planner.problem import Problem
from cleave.planner.result.prediction import Finalist
from cleave.planner.result.text import milliseconds, number, percent, plan_label
from cleave.planner.search.trials import Span, Targets
from cleave.simulator.outcome import Outcome

_UNITS = {Objective.COST: "per hour", Objective.POWER: "W"}
_EQUAL = 1e-6


@dataclass(frozen=True, slots=True)
class Ranking:
    """Predicted plans, best first, and the verdict."""

    verdict: Verdict
    ordered: tuple[Finalist, ...]
    """The selected plan first, unless infeasible."""


def rank(problem: Problem, finalists: Sequence[Finalist], targets: Targets) -> Ranking:
    """Sort plans that serve the rate first; then by score, then by goodput per resource."""
    objective = problem.planning.objective

    def key(each: Finalist) -> tuple[bool, float, float]:
        per_resource = each.plan.prediction.goodput / each.draft.resources(objective)
        return each.holds(targets.attainment), each.plan.score, per_resource

    ordered = sorted(finalists, key=key, reverse=True)
    allowed = [each for each in ordered if _is_allowed(problem, each)]
    if not allowed or not allowed[0].holds(targets.attainment):
        return Ranking(Verdict.INFEASIBLE, tuple(ordered))
    selected = _simplest(allowed, targets, objective)
    others = [each for each in ordered if each is not selected]
    is_disaggregated = selected.draft.is_disaggregated
    verdict = Verdict.DISAGGREGATE if is_disaggregated else Verdict.COLOCATE
    return Ranking(verdict, (selected, *others))


def rival(ranking: Ranking) -> Finalist | None:
    """The best plan of the other kind (disaggregated or colocated) than the first."""
    first = ranking.ordered[0].draft.is_disaggregated
    others = (each for each in ranking.ordered if each.draft.is_disaggregated != first)
    return next(others, None)


def reason(problem: Problem, ranking: Ranking, targets: Targets, why_affinity: str) -> str:
    """One sentence: why the selected plan."""
    selected, other = ranking.ordered[0], rival(ranking)
    plan = selected.plan
    summary = (
        f"{plan_label(plan)} holds {number(problem.rate)} req/s with {_gpus(plan.gpus)} "
        f"({percent(plan.prediction.attainment)} of requests in time)"
    )
    requested = problem.planning.disaggregation
    if requested is not Disaggregation.AUTO:
        return f"{summary}; disaggregation: {requested.value} was requested"
    compared = _compared(problem, selected, other, targets)
    if ranking.verdict is Verdict.COLOCATE:
        return f"do not disaggregate: {summary}; {compared}"
    return f"{summary}; {compared}; {why_affinity}"


def infeasible(
    problem: Problem, ranking: Ranking | None, nearest: NearestSlo | None, targets: Targets
) -> str:
    """One sentence: why there is no plan, and what SLO is feasible."""
    target = (
        f"TTFT {milliseconds(targets.ttft_ms)} and TPOT {milliseconds(targets.tpot_ms)} for "
        f"{percent(targets.attainment)} of {number(problem.rate)} req/s"
    )
    would = (
        f"nearest SLO that holds is TTFT {milliseconds(nearest.ttft_ms)} and TPOT "
        f"{milliseconds(nearest.tpot_ms)} ({number(nearest.scale)} times the requested one), with "
        f"{nearest.plan}"
        if nearest
        else f"no multiple of this SLO was found that {_gpus(problem.max_gpus)} hold at this rate"
    )
    if short := problem.slo.like_seconds:
        names = " and ".join(field.removesuffix("Ms").upper() for field in short)
        would = f"{would}; {names} targets are in milliseconds: are these seconds?"
    best = _most(ranking)
    if best is None or best.plan.prediction.goodput <= 0:
        return f"infeasible: no plan meets {target} at any rate; {would}"
    served = best.plan.prediction.goodput
    return (
        f"infeasible: {target} is more than {_gpus(problem.max_gpus)} serve; "
        f"{plan_label(best.plan)} serves {number(served)} req/s within it; {would}"
    )


def what_would_help(problem: Problem, ranking: Ranking, nearest: NearestSlo | None) -> str:
    """One sentence: what would make an infeasible deployment feasible."""
    remedies = [f"an SLO {number(nearest.scale)} times as long"] if nearest else []
    best = _most(ranking)
    if best is not None and best.plan.prediction.goodput > 0:
        needed = math.ceil(best.plan.gpus * problem.rate / best.plan.prediction.goodput)
        remedies.append(f"about {_gpus(needed)} in the proportion of the best plan")
        remedies.append(f"a rate of {number(best.plan.prediction.goodput)} req/s")
    if not remedies:
        # Neither this SLO at any rate nor any SLO at this rate was found feasible.
        return (
            "faster GPUs, or a longer SLO together with a lower rate or more GPUs, would make it "
            "feasible"
        )
    return f"{' or '.join(remedies)} would make it feasible"


def what_would_change(
    problem: Problem, ranking: Ranking, targets: Targets, switch_tpot_ms: float | None
) -> str:
    """One sentence: the runner-up, and what would make it the selected plan.

    `switch_tpot_ms`: TPOT target from which the best colocated plan needs no more than the selected
    disaggregated one; None: not computed.
    """
    if len(ranking.ordered) < 2:
        return "there is no other plan that meets this SLO"
    other = rival(ranking)
    if other is None:
        return f"the runner-up is {_taking(problem, ranking.ordered[1])}, of the same kind"
    runner_up = f"the runner-up is {_taking(problem, other)}"
    if ranking.verdict is Verdict.COLOCATE:
        return f"{runner_up}; {_until(ranking.ordered[0], targets)}"
    if switch_tpot_ms is None or math.isinf(switch_tpot_ms):
        return f"{runner_up}; no TPOT target makes it need no more, as TTFT is missed"
    return (
        f"{runner_up}; from a TPOT target of {milliseconds(switch_tpot_ms)} on it needs no more "
        "resources"
    )


def least_tpot_ms(outcome: Outcome, span: Span, targets: Targets) -> float:
    """Smallest TPOT target that these requests meet with the given TTFT target; infinite: none."""
    in_time = outcome.ttft_ms[span.window] <= targets.ttft_ms
    tpot_ms = np.where(in_time, outcome.tpot_ms[span.window], np.inf)
    ended = np.where(np.isnan(tpot_ms), np.inf, tpot_ms)
    return float(np.quantile(ended, targets.attainment, method="higher"))


def _is_allowed(problem: Problem, finalist: Finalist) -> bool:
    match problem.planning.disaggregation:
        case Disaggregation.ALWAYS:
            return finalist.draft.is_disaggregated
        case Disaggregation.NEVER:
            return not finalist.draft.is_disaggregated
        case Disaggregation.AUTO:
            return True


def _simplest(allowed: Sequence[Finalist], targets: Targets, objective: Objective) -> Finalist:
    """The first, or a colocated plan that needs no more and is not significantly worse."""
    first = allowed[0]
    if not first.draft.is_disaggregated:
        return first
    for other in allowed[1:]:
        takes_no_more = other.draft.resources(objective) <= first.draft.resources(objective)
        if (
            not other.draft.is_disaggregated
            and other.holds(targets.attainment)
            and takes_no_more
            and not _is_surely_better(first, other)
        ):
            return other
    return first


def _is_surely_better(finalist: Finalist, other: Finalist) -> bool:
    """Whether the confidence intervals of goodput do not overlap."""
    return finalist.plan.prediction.goodput_interval[0] > other.plan.prediction.goodput_interval[1]


def _compared(
    problem: Problem, selected: Finalist, other: Finalist | None, targets: Targets
) -> str:
    kinds = ("colocated", "disaggregated")
    kind = kinds[not selected.draft.is_disaggregated]
    if other is None:
        return f"no {kind} plan meets this SLO"
    objective = problem.planning.objective
    ours, theirs = selected.draft.resources(objective), other.draft.resources(objective)
    if not other.holds(targets.attainment):
        served = number(other.plan.prediction.goodput)
        return f"the best {kind} plan serves {served} req/s with all the GPUs it can have"
    if abs(ours - theirs) > _EQUAL * ours:
        return (
            f"the best {kind} plan takes {_amount(theirs, objective)} instead of "
            f"{_amount(ours, objective)}"
        )
    if _is_surely_better(selected, other):
        gain = selected.plan.prediction.goodput / other.plan.prediction.goodput - 1
        return (
            f"the best {kind} plan needs as much and serves less: this one's goodput is "
            f"{percent(gain)} higher"
        )
    return (
        f"the best {kind} plan needs as much and is not significantly better: goodput "
        f"{_interval(other)} against {_interval(selected)} (95 % confidence)"
    )


def _interval(finalist: Finalist) -> str:
    low, high = finalist.plan.prediction.goodput_interval
    return f"{number(low)}-{number(high)} req/s"


def _taking(problem: Problem, finalist: Finalist) -> str:
    plan, objective = finalist.plan, problem.planning.objective
    taken = _amount(finalist.draft.resources(objective), objective)
    return (
        f"{plan_label(plan)} ({plan.algorithm}, {taken}, "
        f"{number(plan.prediction.goodput)} req/s at most)"
    )


def _amount(resources: float, objective: Objective) -> str:
    if objective is Objective.GOODPUT_PER_GPU:
        return _gpus(round(resources))
    return f"{number(resources)} {_UNITS[objective]}"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _until(selected: Finalist, targets: Targets) -> str:
    """The TPOT target and the rate at which a colocated plan stops being enough."""
    tpot_ms = least_tpot_ms(selected.outcome, selected.span, targets)
    goodput = selected.plan.prediction.goodput
    return (
        f"below a TPOT target of {milliseconds(tpot_ms)} or above {number(goodput)} req/s the "
        "colocated plan needs more GPUs and the choice is open again"
    )


def _most(ranking: Ranking | None) -> Finalist | None:
    finalists = ranking.ordered if ranking else ()
    return max(finalists, key=lambda each: each.plan.prediction.goodput, default=None)
