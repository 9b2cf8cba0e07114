"""A look at what runs, in the planner's process: is the model right, and is another plan better?

Called by the planner's desk. Turns the operator's question into the planner's, and back.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.observed import SeenPrediction
from cleave.api.planned import LatencyPercentiles
from cleave.api.pools import Flipping
from cleave.api.role import Role
from cleave.controller.actions import PlanOutcome, Review, Reviewed
from cleave.controller.loop.basis import from_correction, to_correction
from cleave.controller.observed import timestamp
from cleave.perf.corrected import correct
from cleave.planner import growth
from cleave.planner.bench import to_draft
from cleave.planner.draft import planned_pools
from cleave.planner.guard import Judgement
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.replay import Running
from cleave.planner.revision import Left, Revision, Verdict, revise
from cleave.pods.pool import selected_plan
from cleave.policy.pooling import make_terms


def answer(
    deployment: LLMDeployment, problem: Problem, question: PlanOutcome, review: Review
) -> PlanOutcome:
    """`question` with what came of `review`. Raises PlanError.

    `problem` states the traffic that was seen, and the model without a correction.
    """
    pools = _as_found(problem, review.pools, review.algorithm)
    flips = deployment.spec.pools
    has_manager = flips.flipping is Flipping.AUTO and any(p.role is Role.PREFILL for p in pools)
    manager = make_terms(deployment.spec.slo.ttft_ms, flips.min_prefill, flips.min_decode)
    running = Running(pools, review.algorithm, manager if has_manager else None)
    left = [Left(_as_found(problem, each.pools, ""), each.at_s) for each in review.left]
    correction = question.basis.correction if question.basis else None
    found = revise(problem, running, review.windows, to_correction(correction), review.terms, left)
    reviewed = Reviewed(
        verdict=found.decision.verdict,
        reason=found.decision.reason,
        holds=None if found.judgement.error is None else found.judgement.holds,
        judged=found.judgement.reason,
        prediction=_prediction(found.judgement, review),
        correction=from_correction(found.judgement.correction, question.model_digest),
    )
    plan = _plan(deployment, problem, found)
    return replace(question, reviewed=reviewed, plan=plan)


def _as_found(
    problem: Problem, pools: Iterable[PlannedPool], algorithm: str
) -> tuple[PlannedPool, ...]:
    """With all that the planner states of its own pools, so that both can be compared."""
    return planned_pools(to_draft(problem, pools, algorithm))


def _plan(deployment: LLMDeployment, problem: Problem, found: Revision) -> dict[str, object] | None:
    """As `status.plan` tells it; None: what runs stays."""
    if found.proposed is None or found.answer is None:
        return None
    if found.decision.verdict not in (Verdict.APPLY, Verdict.PROPOSE):
        return None
    told = replace(found.answer, selected=found.proposed)
    reason = f"{found.answer.reason} ({found.decision.reason})"
    law = None
    if deployment.spec.scaling.roles:
        right = correct(problem.estimator, found.judgement.correction)
        law = growth.told(replace(problem, estimator=right), found.proposed)
    plan = selected_plan(deployment, Placement(found.proposed.pools, reason, told), law)
    return plan.model_dump(mode="json", exclude_none=True)


def _prediction(judged: Judgement, review: Review) -> SeenPrediction:
    by_name = {each.name: each.predicted for each in judged.comparisons}

    def percentiles(latency: str) -> LatencyPercentiles | None:
        if not by_name:
            return None
        p50, p90 = (round(by_name[f"{share} {latency}"], 1) for share in ("P50", "P90"))
        return LatencyPercentiles(p50=p50, p90=p90)

    error = judged.error
    return SeenPrediction.model_validate(
        {
            "at": timestamp(review.at_s),
            "attainment": round(judged.attainment, 4),
            "ttft_ms": percentiles("TTFT"),
            "tpot_ms": percentiles("TPOT"),
            "error": None if error is None or math.isinf(error) else round(abs(error), 3),
        }
    )
