"""Which placement a deployment has now: stated by hand, planned, or none yet. Pure.

Called by the deployment's reconcile. What is hard: a plan stays as long as what it rests on does.
It is kept in status with a digest of that, so that an operator that starts anew plans nothing anew.
"""

from dataclasses import dataclass, replace

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.observed import PlanBasis
from cleave.api.planned import SelectedPlan
from cleave.api.planning import Mode
from cleave.controller import conditions
from cleave.controller.actions import PlanOutcome
from cleave.controller.conditions import PLANNING, Condition
from cleave.controller.inventory import Inventory
from cleave.controller.wanted import digest
from cleave.planner import checks
from cleave.planner.placement import Placement, PlanError, plan, to_planned
from cleave.pods.labels import Manifest
from cleave.pods.pool import selected_plan

PLAN_READY = "PlanReady"
PLAN_FEASIBLE = "PlanFeasible"
MODEL_UNKNOWN = "ModelUnknown"
"""Why PlanReady is False where there is traffic to plan for and no model to plan with."""
_CONDITIONS = (PLAN_READY, PLAN_FEASIBLE)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to run, and what to say about it."""

    placement: Placement | None
    """None: what runs stays as it is."""
    plan: Manifest | None
    """For `status.plan`."""
    conditions: tuple[Condition, ...]
    advice: Manifest | None = None
    """For `status.advice`."""
    question: PlanOutcome | None = None
    """What the planner is to be asked."""


def decide(
    deployment: LLMDeployment,
    status: Manifest,
    there: Inventory,
    outcome: PlanOutcome | None,
    *,
    is_limited: bool,
    basis: PlanBasis | None = None,
) -> Decision:
    """The placement in force.

    `outcome` is the planner's last answer for this deployment; `is_limited`: whether instances find
    no node; `basis`: what is planned from instead of what the spec states.
    """
    spec = deployment.spec
    is_advisory = spec.planning.mode is Mode.ADVISORY
    stated = spec.placement is not None
    has_traffic = spec.workload is not None or basis is not None
    question = PlanOutcome(inputs(deployment, there, basis), there.numbers, basis)
    unknown = checks.unknown_model(deployment, reads_files=False)
    if stated or not has_traffic or (unknown is not None and not is_advisory):
        decision = _unplanned(deployment, status)
    elif is_advisory:
        decision = Decision(None, status.get("plan"), ())
    else:
        return _planned(status, question, outcome, is_limited=is_limited)
    if not is_advisory or not has_traffic:
        return decision
    if stated and (decision.placement is None or unknown is not None):
        # What is said of the placement that is stated counts more than that there is no advice.
        return decision
    if unknown is not None:
        why = f"nothing is advised, as the planner does not know the model: {unknown}"
        return replace(decision, conditions=_not_ready(MODEL_UNKNOWN, why))
    return _advised(decision, status, question, outcome)


def kept(status: Manifest) -> Decision:
    """What is in force, with what was said of it."""
    said = tuple(each for each in conditions.read(status) if each.type in _CONDITIONS)
    return Decision(
        None,
        status.get("plan"),
        said or _not_ready("Paused", "spec.paused: nothing is planned"),
        status.get("advice"),
    )


def inputs(deployment: LLMDeployment, there: Inventory, basis: PlanBasis | None = None) -> str:
    """Digest of what a plan rests on. Environment and image of the engine change no plan."""
    spec = deployment.spec
    parts = spec.model_dump(
        mode="json",
        exclude_defaults=True,
        include={"model", "slo", "workload", "planning", "engine"},
        exclude={"engine": {"env", "image"}, "planning": {"mode", "replan"}, "model": {"cache"}},
    )
    # Emulated engines run on any node.
    kinds = there.kinds if spec.engine.type is EngineType.VLLM else ""
    base = [{name: part for name, part in parts.items() if part}, kinds]
    if spec.scaling.roles:
        # Then the plan has to say how it grows.
        base.append("growth")
    return digest([*base, basis.model_dump(mode="json")] if basis else base)


def placed(written: Manifest) -> Placement:
    """The placement that a `status.plan` tells of. Raises ValueError when it is not readable."""
    told = SelectedPlan.model_validate(written, by_alias=True)
    return Placement(tuple(map(to_planned, told.pools)), told.reason)


def _unplanned(deployment: LLMDeployment, status: Manifest) -> Decision:
    """By hand, or the smallest fleet where there is nothing to plan from or with."""
    try:
        placement = plan(deployment, reads_files=False)
    except PlanError as error:
        return _kept(status, "Faulty", "; ".join(error.faults))
    told = _written(selected_plan(deployment, placement))
    if deployment.spec.placement is not None:
        return Decision(placement, told, _ready("Stated", placement.reason))
    # It serves, and yet nobody should take it for a plan.
    reason = "NotPlanned" if deployment.spec.workload is None else MODEL_UNKNOWN
    return Decision(placement, told, _not_ready(reason, placement.reason))


def _planned(
    status: Manifest,
    question: PlanOutcome,
    outcome: PlanOutcome | None,
    *,
    is_limited: bool,
) -> Decision:
    answer = _answer(outcome, question)
    is_elsewhere = answer is not None and answer.numbers != question.numbers
    held = _held(status, question.inputs)
    if answer is not None and answer.plan is not None and not (is_limited and is_elsewhere):
        return Decision(placed(answer.plan), answer.plan, _ready("Planned", _reason(answer.plan)))
    if held is not None and not (is_limited and is_elsewhere):
        plan_before = status["plan"]
        return Decision(held, plan_before, _ready("Planned", _reason(plan_before)))
    if answer is not None and not is_elsewhere:
        return _refused(status, answer)
    waiting = _kept(status, PLANNING, "the planner is at work; what runs stays until it answers")
    return Decision(None, waiting.plan, waiting.conditions, question=question)


def _answer(outcome: PlanOutcome | None, question: PlanOutcome) -> PlanOutcome | None:
    """The planner's last answer, if it is one to this question."""
    is_one = outcome and outcome.inputs == question.inputs and outcome.review is None
    return outcome if is_one else None


def _refused(status: Manifest, answer: PlanOutcome) -> Decision:
    """The planner has no plan; more nodes, or an edit, bring the question back."""
    if answer.infeasible:
        why = f"{answer.infeasible}; spec.placement.manual brings it up all the same"
        return Decision(
            None,
            status.get("plan"),
            (Condition(PLAN_READY, False, "Infeasible", why),
             Condition(PLAN_FEASIBLE, False, "Infeasible", why)),
        )  # fmt: skip
    return _kept(status, "Faulty", "; ".join(answer.faults))


def _advised(
    decision: Decision, status: Manifest, question: PlanOutcome, outcome: PlanOutcome | None
) -> Decision:
    """What runs stays; the plan is only told."""
    answer = _answer(outcome, question)
    advice = answer.plan if answer else None
    before = status.get("advice")
    if advice is None and before and before.get("inputs") == question.inputs:
        advice = before
    if advice is not None:
        told: tuple[Condition, ...] = _ready("Advised", _reason(advice))
    elif answer is not None:
        told = _refused(status, answer).conditions
    else:
        told = _not_ready(PLANNING, "the planner is at work")
    ask = question if advice is None and answer is None else None
    return Decision(decision.placement, decision.plan, told, advice, ask)


def _held(status: Manifest, wanted_inputs: str) -> Placement | None:
    """The plan in status, where it was made from the same inputs."""
    written = status.get("plan") or {}
    if written.get("inputs") != wanted_inputs:
        return None
    try:
        return placed(written)
    except (ValidationError, ValueError):
        return None


def _kept(status: Manifest, reason: str, message: str) -> Decision:
    return Decision(None, status.get("plan"), _not_ready(reason, message))


def _ready(reason: str, message: str) -> tuple[Condition, ...]:
    return (
        Condition(PLAN_READY, True, reason, message),
        Condition(PLAN_FEASIBLE, True, reason),
    )


def _not_ready(reason: str, message: str) -> tuple[Condition, ...]:
    return (
        Condition(PLAN_READY, False, reason, message),
        Condition(PLAN_FEASIBLE, None, reason),
    )


def _reason(plan_told: Manifest) -> str:
    return str(plan_told.get("reason", ""))


def _written(told: SelectedPlan) -> Manifest:
    return told.model_dump(mode="json", exclude_none=True)
