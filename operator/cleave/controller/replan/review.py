"""Reviews a running plan in the planner's process: is the model accurate, is another plan better?

Called by `cleave.controller.replan.planner_process`. Converts the operator's request to the
planner's types, and the result back.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.plan import LatencyPercentiles
from cleave.api.pools import Flipping
from cleave.api.replan_status import SeenPrediction
from cleave.api.role import Role
from cleave.controller.cluster.actions import PlanOutcome, Review, Reviewed
from cleave.controller.cluster.objects import timestamp
from cleave.controller.replan.inputs import from_correction, to_correction
from cleave.manifests.pool import selected_plan
from cleave.perf.latency_correction import correct
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.pool_simulation import to_draft
from cleave.planner.problem import Problem
from cleave.planner.replan.model_check import Judgement
from cleave.planner.replan.replay import Running
from cleave.planner.replan.revision import Left, Revision, Verdict, revise
from cleave.planner.scaling_law import growth
from cleave.planner.search.candidate_placement import planned_pools
from cleave.policy.role_flipping import make_terms


def answer(
    deployment: LLMDeployment, problem: Problem, job: PlanOutcome, review: Review
) -> PlanOutcome:
    """Return `job` with the result of `review`. Raises PlanError.

    `problem` has the observed traffic, and the latency model without a correction.
    """
    pools = _as_found(problem, review.pools, review.algorithm)
    flips = deployment.spec.pools
    has_manager = flips.flipping is Flipping.AUTO and any(p.role is Role.PREFILL for p in pools)
    manager = make_terms(deployment.spec.slo.ttft_ms, flips.min_prefill, flips.min_decode)
    running_plan = Running(pools, review.algorithm, manager if has_manager else None)
    past_plans = [Left(_as_found(problem, each.pools, ""), each.at_s) for each in review.left]
    correction = job.basis.correction if job.basis else None
    revision = revise(
        problem, running_plan, review.windows, to_correction(correction), review.terms, past_plans
    )
    reviewed = Reviewed(
        verdict=revision.decision.verdict,
        reason=revision.decision.reason,
        holds=None if revision.judgement.error is None else revision.judgement.holds,
        judged=revision.judgement.reason,
        prediction=_prediction(revision.judgement, review),
        correction=from_correction(revision.judgement.correction, job.model_digest),
    )
    plan = _plan(deployment, problem, revision)
    return replace(job, reviewed=reviewed, plan=plan)


def _as_found(
    problem: Problem, pools: Iterable[PlannedPool], algorithm: str
) -> tuple[PlannedPool, ...]:
    """Complete pools with all that the planner sets in its own, so that both can be compared."""
    return planned_pools(to_draft(problem, pools, algorithm))


def _plan(
    deployment: LLMDeployment, problem: Problem, revision: Revision
) -> dict[str, object] | None:
    """Convert the new plan to the form of `status.plan`; None: the running plan stays."""
    if revision.proposed is None or revision.answer is None:
        return None
    if revision.decision.verdict not in (Verdict.APPLY, Verdict.PROPOSE):
        return None
    chosen = replace(revision.answer, selected=revision.proposed)
    reason = f"{revision.answer.reason} ({revision.decision.reason})"
    scaling_law = None
    if deployment.spec.scaling.roles:
        corrected = correct(problem.estimator, revision.judgement.correction)
        scaling_law = growth.told(replace(problem, estimator=corrected), revision.proposed)
    plan = selected_plan(
        deployment, Placement(revision.proposed.pools, reason, chosen), scaling_law
    )
    return plan.model_dump(mode="json", exclude_none=True)


def _prediction(assessment: Judgement, review: Review) -> SeenPrediction:
    by_name = {each.name: each.predicted for each in assessment.comparisons}

    def percentiles(latency: str) -> LatencyPercentiles | None:
        if not by_name:
            return None
        p50, p90 = (round(by_name[f"{share} {latency}"], 1) for share in ("P50", "P90"))
        return LatencyPercentiles(p50=p50, p90=p90)

    error = assessment.error
    return SeenPrediction.model_validate(
        {
            "at": timestamp(review.at_s),
            "attainment": round(assessment.attainment, 4),
            "ttft_ms": percentiles("TTFT"),
            "tpot_ms": percentiles("TPOT"),
            "error": None if error is None or math.isinf(error) else round(abs(error), 3),
        }
    )
