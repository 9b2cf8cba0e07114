"""Reviews a running plan in the planner's process: checks the model and searches for a better plan.

Called by `cleave.controller.replan.planner_process`. Converts the operator's request to the
planner's types, and the result back.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.plan import LatencyPercentiles
from cleave.api.replan_status import CurrentPrediction
from cleave.controller.cluster.actions import PlanJob, PlanReview, ReviewResult
from cleave.controller.cluster.objects import format_timestamp
from cleave.controller.replan.inputs import from_correction, to_correction
from cleave.manifests.pool import build_selected_plan
from cleave.perf.latency_correction import apply_correction
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.replan.model_check import ModelAssessment
from cleave.planner.replan.replay import RunningPlan
from cleave.planner.replan.revision import ReplacedPlan, ReplanVerdict, Revision, revise
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.planner.scaling_law import growth
from cleave.planner.search.candidate_placement import to_planned_pools


def run_review(
    deployment: LLMDeployment, problem: Problem, job: PlanJob, review: PlanReview
) -> PlanJob:
    """Return `job` with the result of `review`. Raises PlanError. `problem` has the observed
    traffic, and the latency model without a correction."""
    pools = _complete_pools(problem, review.pools, review.algorithm)
    running_plan = RunningPlan(
        pools,
        review.algorithm,
        # What gateways apply now; it may be of an earlier plan.
        review.windows[-1].whole_below_tokens,
    )
    past = [
        ReplacedPlan(_complete_pools(problem, each.pools, ""), each.until_s)
        for each in review.past_plans
    ]
    correction = to_correction(job.fitted_inputs.correction if job.fitted_inputs else None)
    revision = revise(problem, running_plan, review.windows, correction, review.settings, past)
    reviewed = ReviewResult(
        verdict=revision.decision.verdict,
        reason=revision.decision.reason,
        is_accurate=None if revision.assessment.error is None else revision.assessment.holds,
        accuracy_message=revision.assessment.reason,
        prediction=_build_prediction(revision.assessment, review),
        correction=from_correction(revision.assessment.correction, job.model_hash),
    )
    plan = _build_plan(deployment, problem, revision, review)
    return replace(job, review_result=reviewed, plan=plan)


def _complete_pools(
    problem: Problem, pools: Iterable[PlannedPool], algorithm: str
) -> tuple[PlannedPool, ...]:
    """Complete pools with the fields that the planner sets, so that they can be compared."""
    return to_planned_pools(to_candidate_placement(problem, pools, algorithm))


def _build_plan(
    deployment: LLMDeployment,
    problem: Problem,
    revision: Revision,
    review: PlanReview,
) -> dict[str, object] | None:
    """Convert the new plan to the form of `status.plan`; None: the running plan stays."""
    if revision.proposal is None or revision.result is None:
        return None
    if revision.decision.verdict not in (ReplanVerdict.APPLY, ReplanVerdict.PROPOSE):
        return None
    chosen = replace(revision.result, selected=revision.proposal)
    reason = f"{revision.result.reason} ({revision.decision.reason})"
    scaling_law = None
    if deployment.spec.scaling.roles:
        corrected = apply_correction(problem.estimator, revision.assessment.correction)
        problem = replace(problem, estimator=corrected)
        scaling_law = growth.to_plan_growth(problem, revision.proposal)
    placement = Placement(revision.proposal.pools, reason, chosen, review.max_model_len)
    plan = build_selected_plan(resolve_in_cluster(deployment), placement, scaling_law)
    return plan.model_dump(mode="json", exclude_none=True)


def _build_prediction(assessment: ModelAssessment, review: PlanReview) -> CurrentPrediction:
    by_name = {each.name: each.predicted for each in assessment.comparisons}

    def percentiles(latency: str) -> LatencyPercentiles | None:
        if not by_name:
            return None
        p50, p90 = (round(by_name[f"{share} {latency}"], 1) for share in ("P50", "P90"))
        return LatencyPercentiles(p50=p50, p90=p90)

    error = assessment.error
    return CurrentPrediction.model_validate(
        {
            "at": format_timestamp(review.at_s),
            "attainment": round(assessment.attainment, 4),
            "ttft_ms": percentiles("TTFT"),
            "tpot_ms": percentiles("TPOT"),
            "error": None if error is None or math.isinf(error) else round(abs(error), 3),
        }
    )
