"""Ranks predicted plans and explains the verdict: disaggregate, colocate or infeasible.

Pure; it only reads the simulations of the predicted plans. What is hard: not to claim a gain that
another sample of requests would undo. Where two plans need the same resources and their confidence
intervals overlap, the simpler one is selected and the sentence says so: colocated before
disaggregated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cleave.api.deployment import Slo
from cleave.api.planning import Disaggregation
from cleave.planner.plan import NearestSlo, PlanVerdict
from cleave.planner.problem import Problem
from cleave.planner.result.margins import has_margin
from cleave.planner.result.prediction import PredictedPlan
from cleave.planner.result.text import (
    format_attainment,
    format_gpus,
    format_interval,
    format_ms,
    format_number,
    format_percent,
    format_plan,
    format_resources,
    format_targets,
)
from cleave.planner.search.trials import ITL_LEVEL, TrialSpan
from cleave.simulator.outcome import SimulationResult, compute_quantile

_RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Ranking:
    """Predicted plans, best first, and the verdict."""

    verdict: PlanVerdict
    ordered: tuple[PredictedPlan, ...]
    """The selected plan first, unless infeasible."""


def rank_plans(problem: Problem, finalists: Sequence[PredictedPlan]) -> Ranking:
    """Sort plans that serve the rate by resources, then goodput; the others come last, those that
    serve most first."""
    objective = problem.planning.objective

    def key(each: PredictedPlan) -> tuple[bool, float, float]:
        holds = each.holds(problem.slo)
        taken = float(f"{each.placement.get_resources(objective):.6g}") if holds else 0.0
        return not holds, taken, -each.plan.prediction.goodput

    ordered = sorted(finalists, key=key)
    allowed = [each for each in ordered if _is_allowed(problem, each)]
    if not allowed or not allowed[0].holds(problem.slo):
        return Ranking(PlanVerdict.INFEASIBLE, tuple(ordered))
    selected = _select_simplest(problem, allowed)
    others = [each for each in ordered if each is not selected]
    is_disaggregated = selected.placement.is_disaggregated
    verdict = PlanVerdict.DISAGGREGATE if is_disaggregated else PlanVerdict.COLOCATE
    return Ranking(verdict, (selected, *others))


def find_rival(ranking: Ranking) -> PredictedPlan | None:
    """The best plan of the other kind (disaggregated or colocated) than the first."""
    first = ranking.ordered[0].placement.is_disaggregated
    others = (each for each in ranking.ordered if each.placement.is_disaggregated != first)
    return next(others, None)


def explain_selection(problem: Problem, ranking: Ranking, why_affinity: str) -> str:
    """One sentence: why the selected plan."""
    selected, other = ranking.ordered[0], find_rival(ranking)
    plan = selected.plan
    holds = "holds" if has_margin(problem, selected) else "just holds"
    if not selected.holds(problem.slo):
        holds = "nearly holds"
    summary = (
        f"{format_plan(plan)} {holds} {format_number(problem.rate)} req/s with "
        f"{format_gpus(plan.gpus)} ({format_attainment(plan.prediction)} of requests in "
        f"time{_describe_own_targets(problem, selected)})"
    )
    if plan.max_model_len is not None:
        summary = f"{summary}; {_explain_limit(problem, plan.max_model_len)}"
    requested = problem.planning.disaggregation
    if requested is not Disaggregation.AUTO:
        return f"{summary}; disaggregation: {requested.value} was requested"
    kind = "colocated plan" if selected.placement.is_disaggregated else "disaggregated plan"
    compared = _compare(problem, selected, other, kind)
    if selected.trace.output_tokens.max() == 1:
        compared = "answers of one token have no decode phase"
    if ranking.verdict is PlanVerdict.COLOCATE:
        return f"do not disaggregate: {summary}; {compared}"
    return "; ".join(filter(None, (summary, compared, why_affinity)))


def _describe_own_targets(problem: Problem, finalist: PredictedPlan) -> str:
    slo, found, text = problem.slo, finalist.plan.prediction, ""
    if slo.ttft_attainment is not None:
        text += f", by TTFT {format_percent(found.ttft_attainment)}"
    if slo.tpot_attainment is not None:
        text += f", by TPOT {format_percent(found.tpot_attainment)}"
    if slo.itl_p99_ms is not None:
        text += f", 99 % of tokens within {format_ms(found.itl_ms.p99)}"
    return text


def _explain_limit(problem: Problem, tokens: int) -> str:
    """That the plan bounds requests, and why."""
    return (
        f"model.maxModelLen {tokens:,} is set, as the KV of the model's "
        f"{problem.demand.max_model_len:,} tokens has no room beside the weights (the longest "
        f"request of the traffic has {problem.demand.longest_request:,}); name it in spec.model "
        "for other plans"
    )


def explain_infeasible(problem: Problem, ranking: Ranking, nearest: NearestSlo | None) -> str:
    """One sentence: why there is no plan, and what SLO is feasible."""
    slo = problem.slo
    target = (
        f"{format_targets(slo)} for {format_percent(slo.attainment)} of "
        f"{format_number(problem.rate)} req/s"
    )
    would = (
        f"nearest SLO that holds is {format_targets(nearest)} ({format_number(nearest.scale)} "
        "times the "
        f"requested {_name_longer(slo, nearest)}), with {nearest.plan}"
        if nearest
        else f"no multiple of this SLO was found that {format_gpus(problem.max_gpus)} "
        "hold at this rate"
    )
    if short := slo.suspicious_targets:
        names = " and ".join(field.removesuffix("Ms").upper() for field in short)
        would = f"{would}; {names} targets are in milliseconds: are these seconds?"
    best = _find_max_goodput(ranking)
    if best is None or best.plan.prediction.goodput <= 0:
        return f"infeasible: no plan meets {target} at any rate; {would}"
    served = best.plan.prediction.goodput
    return (
        f"infeasible: {target} is more than {format_gpus(problem.max_gpus)} serve; "
        f"{format_plan(best.plan)} serves {format_number(served)} req/s within it; {would}"
    )


def describe_remedies(problem: Problem, ranking: Ranking, nearest: NearestSlo | None) -> str:
    """One sentence: what would make an infeasible deployment feasible."""
    remedies = []
    if nearest:
        longer = _name_longer(problem.slo, nearest)
        article = "an" if longer.startswith(("SLO", "ITL")) else "a"
        remedies.append(f"{article} {longer} {format_number(nearest.scale)} times as long")
    best = _find_max_goodput(ranking)
    if best is not None and best.plan.prediction.goodput > 0:
        needed = math.ceil(best.plan.gpus * problem.rate / best.plan.prediction.goodput)
        remedies.append(f"about {format_gpus(needed)} in the proportion of the best plan")
        remedies.append(f"a rate of {format_number(best.plan.prediction.goodput)} req/s")
    if not remedies:
        # Neither this SLO at any rate nor any SLO at this rate was found feasible.
        return (
            "faster GPUs, or a longer SLO together with a lower rate or more GPUs, would make it "
            "feasible"
        )
    return f"{' or '.join(remedies)} would make it feasible"


def describe_runner_up(
    problem: Problem, ranking: Ranking, switch_ms: Mapping[str, float] | None
) -> str:
    """One sentence: the runner-up, and what would make it the selected plan.

    `switch_ms`: targets by name from which instances of the best colocated plan need no more than
    the selected disaggregated one; None: they do already, or one of them takes more.
    """
    if len(ranking.ordered) < 2:
        return "there is no other plan that meets this SLO"
    other = find_rival(ranking)
    if other is None:
        return f"the runner-up is {_format_plan(problem, ranking.ordered[1])}, of the same kind"
    runner_up = f"the runner-up is {_format_plan(problem, other)}"
    if ranking.verdict is PlanVerdict.COLOCATE:
        return f"{runner_up}; {_describe_limit(problem, ranking.ordered[0])}"
    if switch_ms is None:
        return runner_up
    if math.isinf(switch_ms.get("TPOT", 0.0)):
        return f"{runner_up}; no TPOT target makes it need no more, as TTFT is missed"
    targets = " and ".join(
        f"{'an' if name.startswith('ITL') else 'a'} {name} target of {format_ms(ms)}"
        for name, ms in switch_ms.items()
    )
    return f"{runner_up}; from {targets} on its instances need no more resources"


def compute_switch_ms(outcome: SimulationResult, span: TrialSpan, slo: Slo) -> dict[str, float]:
    """By name the targets that these requests miss, as long as they would have to be."""
    tpot_ms = compute_min_tpot_ms(outcome, span, slo)
    itl_ms = outcome.itl.compute_quantile(ITL_LEVEL)
    missed = {"ITL P99": itl_ms} if itl_ms > (slo.itl_p99_ms or math.inf) else {}
    return {"TPOT": tpot_ms, **missed} if tpot_ms > slo.tpot_ms or not missed else missed


def compute_min_tpot_ms(outcome: SimulationResult, span: TrialSpan, slo: Slo) -> float:
    """Smallest TPOT target that these requests meet with the given TTFT target; infinite: none."""
    in_time = outcome.ttft_ms[span.window] <= slo.ttft_ms
    if in_time.mean() < (slo.ttft_attainment or 0.0):
        return math.inf
    tpot_ms = np.where(in_time, outcome.tpot_ms[span.window], np.inf)
    own = compute_quantile(outcome.tpot_ms[span.window], slo.tpot_attainment or 0.0)
    return max(compute_quantile(tpot_ms, slo.attainment), own)


def _is_allowed(problem: Problem, finalist: PredictedPlan) -> bool:
    match problem.planning.disaggregation:
        case Disaggregation.ALWAYS:
            return finalist.placement.is_disaggregated
        case Disaggregation.NEVER:
            return not finalist.placement.is_disaggregated
        case Disaggregation.AUTO:
            return True


def _select_simplest(problem: Problem, allowed: Sequence[PredictedPlan]) -> PredictedPlan:
    """The first, or a simpler plan that needs no more and is not significantly worse."""
    first, objective = allowed[0], problem.planning.objective
    taken = first.placement.get_resources(objective)
    equal = [
        other
        for other in allowed[1:]
        if other.holds(problem.slo)
        and other.placement.get_resources(objective) <= taken
        and not _is_surely_better(first, other)
    ]
    return min([first, *equal], key=lambda each: each.placement.is_disaggregated, default=first)


def _is_surely_better(finalist: PredictedPlan, other: PredictedPlan) -> bool:
    """Whether the confidence intervals of goodput do not overlap."""
    return finalist.plan.prediction.goodput_interval[0] > other.plan.prediction.goodput_interval[1]


def _compare(
    problem: Problem, selected: PredictedPlan, other: PredictedPlan | None, kind: str
) -> str:
    """`other`: the best plan of another kind; None: there is none."""
    if other is None:
        return f"no {kind} meets this SLO"
    objective = problem.planning.objective
    ours, theirs = (each.placement.get_resources(objective) for each in (selected, other))
    if not other.holds(problem.slo):
        served = format_number(other.plan.prediction.goodput)
        taken = format_resources(theirs, objective)
        stalls = ""
        if problem.slo.itl_p99_ms is not None and other.is_uneven(problem.slo):
            stalls = (
                f": its ITL P99 is {format_ms(other.plan.prediction.itl_ms.p99)} at this rate, "
                f"the target {format_ms(problem.slo.itl_p99_ms)}"
            )
        return (
            f"no {kind} that holds the rate was found; the best serves {served} req/s with {taken}"
            f"{stalls}"
        )
    if abs(ours - theirs) > _RELATIVE_TOLERANCE * ours:
        return (
            f"the best {kind} takes {format_resources(theirs, objective)} instead of "
            f"{format_resources(ours, objective)}"
        )
    if _is_surely_better(selected, other):
        gain = selected.plan.prediction.goodput / other.plan.prediction.goodput - 1
        return (
            f"the best {kind} needs as much and serves less: this one's goodput is "
            f"{format_percent(gain)} higher"
        )
    ratio = other.plan.prediction.goodput / selected.plan.prediction.goodput
    return (
        f"either would do: the best {kind} needs as much, and its goodput is within "
        f"{format_percent(abs(ratio - 1))}: {format_interval(other.plan.prediction)} against "
        f"{format_interval(selected.plan.prediction)} (95 % confidence)"
    )


def _format_plan(problem: Problem, finalist: PredictedPlan) -> str:
    plan, objective = finalist.plan, problem.planning.objective
    taken = format_resources(finalist.placement.get_resources(objective), objective)
    return (
        f"{format_plan(plan)} ({plan.algorithm}, {taken}, "
        f"{format_number(plan.prediction.goodput)} req/s at most)"
    )


def _describe_limit(problem: Problem, selected: PredictedPlan) -> str:
    """The TPOT target and the rate at which a colocated plan stops being enough."""
    tpot_ms = compute_min_tpot_ms(selected.outcome, selected.span, problem.slo)
    rate = max(problem.rate, selected.plan.prediction.goodput)
    itl = ""
    if problem.slo.itl_p99_ms is not None:
        itl = f", an ITL P99 target of {format_ms(selected.plan.prediction.itl_ms.p99)}"
    return (
        f"below a TPOT target of {format_ms(tpot_ms)}{itl} or above {format_number(rate)} req/s "
        "the colocated plan needs more GPUs and the choice is open again"
    )


def _name_longer(slo: Slo, nearest: NearestSlo) -> str:
    """The targets of the nearest SLO that are longer than the requested ones."""
    is_longer = {
        "TTFT": nearest.ttft_ms > slo.ttft_ms,
        "TPOT": nearest.tpot_ms > slo.tpot_ms,
        "ITL P99": (nearest.itl_p99_ms or 0.0) > (slo.itl_p99_ms or 0.0),
    }
    names = [name for name, longer in is_longer.items() if longer]
    return f"{names[0]} target" if len(names) == 1 else "SLO"


def _find_max_goodput(ranking: Ranking) -> PredictedPlan | None:
    return max(ranking.ordered, key=lambda each: each.plan.prediction.goodput, default=None)
