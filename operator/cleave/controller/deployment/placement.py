"""Decides which placement a deployment has now: manual, planned, or none yet. Pure.

Called by the deployment's reconcile. A plan stays as long as its inputs do. It is kept in the
status together with a hash of its inputs, so that a restarted operator does not plan again.
"""

from dataclasses import dataclass, replace

from cleave.api.planning import PlanningMode
from cleave.api.replan_status import FittedPlanInputs
from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.conditions import PLANNING, ConditionState
from cleave.controller.replan.inputs import PlanInputs, read_placement
from cleave.manifests.cluster_fit import list_span_faults
from cleave.manifests.kv_link import find_kv_link
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_selected_plan
from cleave.planner.placement import Placement, PlanError, choose_placement

PLAN_READY = "PlanReady"
PLAN_FEASIBLE = "PlanFeasible"
MODEL_UNKNOWN = "ModelUnknown"
"""Reason of PlanReady False when there is traffic to plan for but the model is not known."""
_INFEASIBLE, _FAULTY, _MANUAL = "Infeasible", "Faulty", "Manual"
NO_PLAN = (_INFEASIBLE, _FAULTY)
"""Reasons of PlanReady False when the planner has found no plan on these machines."""
_PLAN_CONDITIONS = (PLAN_READY, PLAN_FEASIBLE)


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """The placement to run, and the conditions about it."""

    placement: Placement | None
    """None: the present pools stay as they are."""
    plan: Manifest | None
    """For `status.plan`."""
    conditions: tuple[ConditionState, ...]
    advice: Manifest | None = None
    """For `status.advice`."""
    plan_request: PlanJob | None = None
    """The request to submit to the planner; None: nothing to plan."""


def decide(
    inputs: PlanInputs,
    status: Manifest,
    outcome: PlanJob | None,
    *,
    is_limited: bool,
    fitted_inputs: FittedPlanInputs | None = None,
) -> PlacementDecision:
    """Decide the current placement.

    `outcome`: the planner's last result for this deployment. `is_limited`: whether instances find
    no node. `fitted_inputs`: observed traffic that replaces the spec's.
    """
    if inputs.model_fault:
        # As pods wait for a ConfigMap: without it weights, plan and pods would be others.
        return _retain_plan(status, MODEL_UNKNOWN, _describe_model_fault(inputs))
    spec = inputs.deployment.spec
    is_advisory = spec.planning.mode is PlanningMode.ADVISORY
    is_manual = spec.placement is not None
    has_traffic = spec.workload is not None or fitted_inputs is not None
    inputs_hash = inputs.hash_with(fitted_inputs)
    current = _read_current_placement(status, inputs_hash)
    request = PlanJob(
        inputs_hash,
        inputs.inventory.node_counts_hash,
        fitted_inputs,
        is_replan=current is not None,
        max_model_len=current.max_model_len if current is not None else None,
    )
    unknown_model = inputs.unknown_model
    if is_manual or not has_traffic or (unknown_model is not None and not is_advisory):
        decision = _decide_without_planner(inputs, status)
    elif is_advisory:
        decision = PlacementDecision(None, status.get("plan"), ())
    else:
        return _decide_planned(status, request, outcome, is_limited=is_limited)
    if not is_advisory or not has_traffic:
        return decision
    if is_manual and (decision.placement is None or unknown_model is not None):
        # The conditions of the manual placement matter more than the missing advice.
        return decision
    if unknown_model is not None:
        why = f"nothing is advised, as the planner does not know the model: {unknown_model}"
        return replace(decision, conditions=_build_not_ready(MODEL_UNKNOWN, why))
    return _decide_advice(decision, status, request, outcome)


def retain(status: Manifest) -> PlacementDecision:
    """Return the current placement with its last conditions, for a paused deployment."""
    previous = tuple(each for each in conditions.read(status) if each.type in _PLAN_CONDITIONS)
    shown = previous or _build_not_ready("Paused", "spec.paused: nothing is planned")
    return PlacementDecision(None, status.get("plan"), shown, status.get("advice"))


def _decide_without_planner(inputs: PlanInputs, status: Manifest) -> PlacementDecision:
    """Manual placement, or the smallest fleet when there is no traffic or no known model."""
    resolved, nodes = inputs.resolved, inputs.inventory
    try:
        placement = choose_placement(resolved)
        if faults := list(list_span_faults(resolved.written, nodes.topology)):
            raise PlanError(faults)
    except PlanError as error:
        return _retain_plan(status, _FAULTY, "; ".join(error.faults))
    if nodes.cluster is not None:
        link = find_kv_link(resolved, placement, nodes.cluster, nodes.topology)
        placement = replace(placement, kv_link=link)
    selected = build_selected_plan(resolved, placement)
    written = selected.model_dump(mode="json", exclude_none=True)
    if resolved.spec.placement is not None:
        return PlacementDecision(placement, written, _build_ready(_MANUAL, selected.reason))
    # The fleet serves, but PlanReady is False: it was not planned.
    reason = "NotPlanned" if resolved.spec.workload is None else MODEL_UNKNOWN
    return PlacementDecision(placement, written, _build_not_ready(reason, selected.reason))


def _decide_planned(
    status: Manifest, request: PlanJob, outcome: PlanJob | None, *, is_limited: bool
) -> PlacementDecision:
    result = _match_result(outcome, request)
    has_other_nodes = result is not None and result.node_counts_hash != request.node_counts_hash
    current = _read_current_placement(status, request.inputs_hash)
    is_valid = not (is_limited and has_other_nodes)
    if result is not None and result.plan is not None and is_valid:
        ready = _build_ready("Planned", _get_reason(result.plan))
        return PlacementDecision(read_placement(result.plan), result.plan, ready)
    if current is not None and is_valid:
        ready = _build_ready("Planned", _get_reason(status["plan"]))
        return PlacementDecision(current, status["plan"], ready)
    if result is not None and not has_other_nodes:
        return _report_failed_plan(status, result)
    text = "the planner is running; instances stay as they are until it has finished"
    return replace(_retain_plan(status, PLANNING, text), plan_request=request)


def _describe_model_fault(inputs: PlanInputs) -> str:
    has_config = inputs.deployment.spec.model.config is not None
    field = "spec.model.config.configMapKeyRef" if has_config else "spec.model.source"
    return f"{field}: {inputs.model_fault}; instances stay as they are until it is usable"


def _match_result(outcome: PlanJob | None, request: PlanJob) -> PlanJob | None:
    """Return the planner's last result if it is for this request; else None."""
    is_match = outcome and outcome.inputs_hash == request.inputs_hash and outcome.review is None
    return outcome if is_match else None


def _report_failed_plan(status: Manifest, result: PlanJob) -> PlacementDecision:
    """The planner found no plan; changed nodes or an edit of the spec submit it again."""
    if result.infeasible:
        why = f"{result.infeasible}; set spec.placement.manual to start it anyway"
        states = (ConditionState(kind, False, _INFEASIBLE, why) for kind in _PLAN_CONDITIONS)
        return PlacementDecision(None, status.get("plan"), tuple(states))
    return _retain_plan(status, _FAULTY, "; ".join(result.faults))


def _decide_advice(
    decision: PlacementDecision, status: Manifest, request: PlanJob, outcome: PlanJob | None
) -> PlacementDecision:
    """The placement stays; the plan is shown in `status.advice` only."""
    result = _match_result(outcome, request)
    advice = result.plan if result else None
    before = status.get("advice")
    if advice is None and before and before.get("inputs") == request.inputs_hash:
        advice = before
    if advice is not None:
        conditions_now: tuple[ConditionState, ...] = _build_ready("Advised", _get_reason(advice))
    elif result is not None:
        conditions_now = _report_failed_plan(status, result).conditions
    else:
        conditions_now = _build_not_ready(PLANNING, "the planner is running")
    to_submit = request if advice is None and result is None else None
    return PlacementDecision(decision.placement, decision.plan, conditions_now, advice, to_submit)


def _read_current_placement(status: Manifest, expected_inputs: str) -> Placement | None:
    """The placement of the plan in the status, if that was made from the same inputs."""
    written = status.get("plan") or {}
    if written.get("inputs") != expected_inputs:
        return None
    try:
        return read_placement(written)
    except ValueError:
        return None


def _retain_plan(status: Manifest, reason: str, message: str) -> PlacementDecision:
    return PlacementDecision(None, status.get("plan"), _build_not_ready(reason, message))


def _build_ready(reason: str, message: str) -> tuple[ConditionState, ...]:
    ready = ConditionState(PLAN_READY, True, reason, message)
    feasible = "the plan meets the targets, as predicted"
    if reason == _MANUAL:
        feasible = "the placement is manual: nothing was predicted"
    return ready, ConditionState(PLAN_FEASIBLE, True, reason, feasible)


def _build_not_ready(reason: str, message: str) -> tuple[ConditionState, ...]:
    not_ready = ConditionState(PLAN_READY, False, reason, message)
    unknown = "there is no plan that could be compared with the targets"
    return not_ready, ConditionState(PLAN_FEASIBLE, None, reason, unknown)


def _get_reason(plan_status: Manifest) -> str:
    return str(plan_status.get("reason", ""))
