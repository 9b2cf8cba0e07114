"""Decides which placement a deployment has now: manual, planned, or none yet. Pure.

Called by the deployment's reconcile. What is hard: a plan stays as long as its inputs do. It is
kept in the status together with a hash of its inputs, so that a restarted operator does not plan
again.
"""

from dataclasses import dataclass, replace

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.plan import SelectedPlan
from cleave.api.planning import Mode
from cleave.api.replan_status import PlanBasis
from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import PlanOutcome
from cleave.controller.cluster.apply import digest
from cleave.controller.cluster.conditions import PLANNING, Condition
from cleave.controller.cluster.inventory import Inventory
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import selected_plan
from cleave.planner import deployment_checks
from cleave.planner.placement import Placement, PlanError, plan, to_planned

PLAN_READY = "PlanReady"
PLAN_FEASIBLE = "PlanFeasible"
MODEL_UNKNOWN = "ModelUnknown"
"""Reason of PlanReady False when there is traffic to plan for but the model is not known."""
_CONDITIONS = (PLAN_READY, PLAN_FEASIBLE)


@dataclass(frozen=True, slots=True)
class Decision:
    """The placement to run, and the conditions about it."""

    placement: Placement | None
    """None: the present pools stay as they are."""
    plan: Manifest | None
    """For `status.plan`."""
    conditions: tuple[Condition, ...]
    advice: Manifest | None = None
    """For `status.advice`."""
    question: PlanOutcome | None = None
    """The request to submit to the planner; None: nothing to plan."""


def decide(
    deployment: LLMDeployment,
    status: Manifest,
    inventory: Inventory,
    outcome: PlanOutcome | None,
    *,
    is_limited: bool,
    basis: PlanBasis | None = None,
) -> Decision:
    """Decide the placement in force.

    `outcome`: the planner's last result for this deployment. `is_limited`: whether instances find
    no node. `basis`: observed traffic that replaces the spec's.
    """
    spec = deployment.spec
    is_advisory = spec.planning.mode is Mode.ADVISORY
    is_manual = spec.placement is not None
    has_traffic = spec.workload is not None or basis is not None
    request = PlanOutcome(inputs(deployment, inventory, basis), inventory.numbers, basis)
    unknown_model = deployment_checks.unknown_model(deployment, reads_files=False)
    if is_manual or not has_traffic or (unknown_model is not None and not is_advisory):
        decision = _unplanned(deployment, status)
    elif is_advisory:
        decision = Decision(None, status.get("plan"), ())
    else:
        return _planned(status, request, outcome, is_limited=is_limited)
    if not is_advisory or not has_traffic:
        return decision
    if is_manual and (decision.placement is None or unknown_model is not None):
        # The conditions of the manual placement matter more than the missing advice.
        return decision
    if unknown_model is not None:
        why = f"nothing is advised, as the planner does not know the model: {unknown_model}"
        return replace(decision, conditions=_not_ready(MODEL_UNKNOWN, why))
    return _advised(decision, status, request, outcome)


def kept(status: Manifest) -> Decision:
    """Return the placement in force with its last conditions, for a paused deployment."""
    previous = tuple(each for each in conditions.read(status) if each.type in _CONDITIONS)
    return Decision(
        None,
        status.get("plan"),
        previous or _not_ready("Paused", "spec.paused: nothing is planned"),
        status.get("advice"),
    )


def inputs(deployment: LLMDeployment, inventory: Inventory, basis: PlanBasis | None = None) -> str:
    """Hash everything that a plan depends on; the engine's env and image change no plan."""
    spec = deployment.spec
    parts = spec.model_dump(
        mode="json",
        exclude_defaults=True,
        include={"model", "slo", "workload", "planning", "engine"},
        exclude={"engine": {"env", "image"}, "planning": {"mode", "replan"}, "model": {"cache"}},
    )
    # Emulated engines run on any node.
    kinds = inventory.kinds if spec.engine.type is EngineType.VLLM else ""
    base = [{name: part for name, part in parts.items() if part}, kinds]
    if spec.scaling.roles:
        # Then the plan needs a scaling law as well.
        base.append("growth")
    return digest([*base, basis.model_dump(mode="json")] if basis else base)


def placed(written: Manifest) -> Placement:
    """Read the placement from `status.plan`. Raises ValueError when it is not readable."""
    selected = SelectedPlan.model_validate(written, by_alias=True)
    return Placement(tuple(map(to_planned, selected.pools)), selected.reason)


def _unplanned(deployment: LLMDeployment, status: Manifest) -> Decision:
    """Manual placement, or the smallest fleet when there is no traffic or no known model."""
    try:
        placement = plan(deployment, reads_files=False)
    except PlanError as error:
        return _kept(status, "Faulty", "; ".join(error.faults))
    written = _written(selected_plan(deployment, placement))
    if deployment.spec.placement is not None:
        return Decision(placement, written, _ready("Manual", placement.reason))
    # The fleet serves, but PlanReady is False: it was not planned.
    reason = "NotPlanned" if deployment.spec.workload is None else MODEL_UNKNOWN
    return Decision(placement, written, _not_ready(reason, placement.reason))


def _planned(
    status: Manifest,
    request: PlanOutcome,
    outcome: PlanOutcome | None,
    *,
    is_limited: bool,
) -> Decision:
    result = _answer(outcome, request)
    has_other_nodes = result is not None and result.numbers != request.numbers
    current = _held(status, request.inputs)
    if result is not None and result.plan is not None and not (is_limited and has_other_nodes):
        return Decision(placed(result.plan), result.plan, _ready("Planned", _reason(result.plan)))
    if current is not None and not (is_limited and has_other_nodes):
        plan_before = status["plan"]
        return Decision(current, plan_before, _ready("Planned", _reason(plan_before)))
    if result is not None and not has_other_nodes:
        return _refused(status, result)
    waiting = _kept(
        status, PLANNING, "the planner is running; instances stay as they are until it has finished"
    )
    return Decision(None, waiting.plan, waiting.conditions, question=request)


def _answer(outcome: PlanOutcome | None, request: PlanOutcome) -> PlanOutcome | None:
    """Return the planner's last result if it answers this request; else None."""
    is_match = outcome and outcome.inputs == request.inputs and outcome.review is None
    return outcome if is_match else None


def _refused(status: Manifest, result: PlanOutcome) -> Decision:
    """The planner found no plan; changed nodes or an edit of the spec submit it again."""
    if result.infeasible:
        why = f"{result.infeasible}; spec.placement.manual brings it up all the same"
        return Decision(
            None,
            status.get("plan"),
            (Condition(PLAN_READY, False, "Infeasible", why),
             Condition(PLAN_FEASIBLE, False, "Infeasible", why)),
        )  # fmt: skip
    return _kept(status, "Faulty", "; ".join(result.faults))


def _advised(
    decision: Decision, status: Manifest, request: PlanOutcome, outcome: PlanOutcome | None
) -> Decision:
    """The placement stays; the plan is shown in `status.advice` only."""
    result = _answer(outcome, request)
    advice = result.plan if result else None
    before = status.get("advice")
    if advice is None and before and before.get("inputs") == request.inputs:
        advice = before
    if advice is not None:
        conditions_now: tuple[Condition, ...] = _ready("Advised", _reason(advice))
    elif result is not None:
        conditions_now = _refused(status, result).conditions
    else:
        conditions_now = _not_ready(PLANNING, "the planner is running")
    to_submit = request if advice is None and result is None else None
    return Decision(decision.placement, decision.plan, conditions_now, advice, to_submit)


def _held(status: Manifest, expected_inputs: str) -> Placement | None:
    """The placement of the plan in the status, if that was made from the same inputs."""
    written = status.get("plan") or {}
    if written.get("inputs") != expected_inputs:
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


def _reason(plan_status: Manifest) -> str:
    return str(plan_status.get("reason", ""))


def _written(selected: SelectedPlan) -> Manifest:
    return selected.model_dump(mode="json", exclude_none=True)
