"""Builds the status of an LLMDeployment: conditions, roles, plan, traffic and address. Pure.

Called by the deployment's reconcile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cleave.api.deployment import LLMDeploymentStatus
from cleave.api.engine import EngineType
from cleave.api.loaded_weights import LoadedWeights
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster import apply, conditions
from cleave.controller.cluster.actions import Action, Emit, PatchStatus
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.deployment import adapters, kv_path, model_report, readiness, weights
from cleave.controller.deployment.placement import PlacementDecision
from cleave.controller.deployment.traffic_status import (
    build_prometheus_condition,
    build_slo_condition,
    report_traffic,
)
from cleave.controller.replan.verdict import ReplanOutcome
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests.gateway import build_url
from cleave.manifests.labels import GATEWAY, Manifest, build_component_labels


def report(
    view: DeploymentView,
    decision: PlacementDecision,
    desired: Pools,
    replan: ReplanOutcome,
    lent: ConditionState | None,
    loaded: LoadedWeights | None,
    *,
    is_applied: bool,
) -> Iterator[Action]:
    """Yield a write of the new status and its Events; nothing when the status is up to date.

    `desired`: desired pools. `lent`: ScalingLimited while other deployments have GPUs of this one.
    `loaded`: the weights that instances are to have.
    `is_applied`: pools and gateways exist as the spec requires.
    """
    deployment, target = view.deployment, apply.build_reference(view.deployment)
    before = view.status.get("conditions", [])
    rolled_out = readiness.find_rolled_out_generation(view, desired, is_applied=is_applied)
    generation, model = deployment.metadata.generation, deployment.spec.model.name
    is_complete = rolled_out == (generation or 0)
    now = _build_conditions(
        view, decision, desired, lent, is_applied=is_applied, is_complete=is_complete
    )
    observed = report_traffic(view)
    now += replan.conditions
    now += build_slo_condition(deployment, observed, view.now_s)
    now += build_prometheus_condition(view.prometheus_fault)
    reports = model_report.list_reports(view, desired)
    reported = model_report.choose_report(view, desired, reports)
    now += model_report.build_condition(deployment, reported, reports)
    for revision in sorted({pool.spec.revision for pool in desired.values()}):
        now += weights.build_condition(view, loaded, revision)
    roles = _list_roles(view, desired)
    labels = build_component_labels(deployment.name, GATEWAY)
    status: Manifest = {
        "observedGeneration": generation or 0,
        "conditions": conditions.merge(before, now, generation, view.now_s),
        # Until the rollout is complete, clients are served under the previous name.
        "model": model if is_complete else view.status.get("model") or model,
        "roles": [_build_role_status(view, role, desired.get(role)) for role in roles],
        "gateways": view.gateway.replicas if view.gateway else 0,
        "gatewaySelector": ",".join(f"{name}={value}" for name, value in labels.items()),
        "url": build_url(deployment),
        **_build_replan_status(observed, replan),
        **model_report.to_status(reported),
        **weights.to_status(loaded),
    }
    optional: Manifest = {"plan": decision.plan, "advice": decision.advice or replan.advice}
    optional["rolledOutGeneration"] = rolled_out
    status |= {name: part for name, part in optional.items() if part is not None}
    if not apply.is_same_status(LLMDeploymentStatus, status, view.status):
        yield PatchStatus(target, status)
        yield from conditions.build_events(target, before, now)
        for event in replan.events:
            yield Emit(target, event.reason, event.message, event.is_warning)


def _build_replan_status(observed: Manifest | None, replan: ReplanOutcome) -> Manifest:
    """Observed traffic and the results of replanning."""
    parts: Manifest = {"observed": observed, "prediction": replan.prediction}
    for name, value in (("basis", replan.fitted_inputs), ("correction", replan.correction)):
        parts[name] = value and value.model_dump(mode="json", exclude_none=True)
    parts["plans"] = list(replan.plans)
    return {name: part for name, part in parts.items() if part}


def _build_conditions(
    view: DeploymentView,
    decision: PlacementDecision,
    desired: Pools,
    lent: ConditionState | None,
    *,
    is_applied: bool,
    is_complete: bool,
) -> list[ConditionState]:
    present = _list_roles(view, desired)
    roles = [_build_role_condition(view, role, desired.get(role)) for role in present]
    gateway, limited = _build_gateway_condition(view), _find_true_in_pools(view, "ScalingLimited")
    limited = (
        lent or limited or ConditionState("ScalingLimited", False, "Fits", "no instance lacks room")
    )
    is_emulated = view.deployment.spec.engine.type is EngineType.EMULATED
    if view.inventory.unusable and not is_emulated:
        text = "; ".join(filter(None, (limited.message, view.inventory.unusable)))
        limited = replace(limited, message=text)
    progressing = _build_progressing(view, decision, desired, limited)
    available = readiness.build_available(view, desired, [*roles, gateway], decision.conditions[0])
    ready = replace(available, type="Ready")
    if available.status and not is_complete:
        ready = readiness.build_not_rolled_out(view, decision, progressing, is_applied=is_applied)
    return [
        ready,
        available,
        *decision.conditions,
        *roles,
        gateway,
        *kv_path.build_conditions(view, desired, decision.plan),
        *adapters.build_conditions(view),
        limited,
        progressing,
        _build_degraded(view, desired, available),
    ]


def _list_roles(view: DeploymentView, desired: Pools) -> list[Role]:
    present = {pod.role for pod in view.pods}
    return [role for role in Role if role in desired or role in present]


def _build_role_status(view: DeploymentView, role: Role, desired: InstancePool | None) -> Manifest:
    pods = view.list_alive(role)
    revision = desired.spec.revision if desired else None
    return {
        "role": str(role),
        "replicas": len(pods),
        "ready": sum(pod.ready for pod in pods),
        "updated": sum(pod.revision == revision for pod in pods),
    }


def _build_role_condition(
    view: DeploymentView, role: Role, desired: InstancePool | None
) -> ConditionState:
    pods = view.list_alive(role)
    ready = sum(pod.ready for pod in pods)
    count = desired.spec.replicas if desired else 0
    kind = f"{role.capitalize()}Ready"
    if desired is not None and count == 0:
        text = f"no {role} instance is desired now"
        return ConditionState(kind, True, readiness.SCALED_TO_ZERO, text)
    reason = "Ready" if ready >= max(1, count) else "TooFew" if ready else "NoneReady"
    text = f"{ready} of {count} {role} instances are ready"
    if ready < count and (cause := _describe_unready(view, pods)):
        text += f"; {cause}"
    return ConditionState(kind, ready > 0, reason, text)


def _describe_unready(view: DeploymentView, pods: Sequence[ObservedPod]) -> str:
    """What the first instance that is not ready does, or why its engine failed, as its agent says,
    or what its pod waits for; empty: not known."""
    for pod in sorted((pod for pod in pods if not pod.ready), key=lambda pod: pod.name):
        reported = view.find_report(pod)
        if reported is not None and reported.reason:
            return f"{pod.name}: {reported.reason}"
        if pod.wait:
            return pod.wait
    return ""


def _find_failing_engine(view: DeploymentView) -> str:
    """An instance that is not ready because its engine has ended; empty: there is none."""
    for pod in view.pods:
        reported = view.find_report(pod)
        if reported is not None and reported.restarts and pod.is_alive and not pod.ready:
            times = "once" if reported.restarts == 1 else f"{reported.restarts} times"
            return f"{pod.name}: {reported.reason} (started again {times})"
    return ""


def _build_gateway_condition(view: DeploymentView) -> ConditionState:
    ready, count = view.gateway.ready if view.gateway else 0, view.deployment.spec.gateway.replicas
    message = f"{ready} of {count} gateways are ready"
    if cause := _find_gateway_fault(view) or (ready < count and view.gateway_wait):
        message += f"; {cause}"
    return ConditionState("GatewayReady", ready > 0, "Ready" if ready else "NoneReady", message)


def _find_gateway_fault(view: DeploymentView) -> str:
    """Why gateways cannot be created or started; empty: they can."""
    refused = view.gateway.fault if view.gateway else ""
    return refused or view.gateway_fault


def _find_true_in_pools(view: DeploymentView, kind: str) -> ConditionState | None:
    """The condition of this type of the first pool where it is True."""
    for role, status in view.pool_status.items():
        if (each := conditions.find(status, kind)) and each["status"] == "True":
            return ConditionState(kind, True, each["reason"], f"{role}: {each['message']}")
    return None


def _build_progressing(
    view: DeploymentView, decision: PlacementDecision, desired: Pools, limited: ConditionState
) -> ConditionState:
    if view.deployment.spec.paused:
        return ConditionState("Progressing", False, "Paused", "spec.paused: changes wait")
    if decision.plan_request is not None:
        return ConditionState("Progressing", True, conditions.PLANNING, "the planner is running")
    roles = _list_roles(view, desired)
    for role in roles:
        pool, pods = desired.get(role), view.list_alive(role)
        if pool is None or any(pod.revision != pool.spec.revision for pod in pods):
            text = f"{role} instances: {_explain_replacement(pods, pool)}"
            return ConditionState("Progressing", True, conditions.ROLLING_OUT, text)
    if not readiness.is_gateway_updated(view):
        text = "gateway pods are being replaced"
        return ConditionState("Progressing", True, conditions.ROLLING_OUT, text)
    for role in roles:
        pool, pods = desired[role], view.list_alive(role)
        if len(pods) != pool.spec.replicas or not all(pod.ready for pod in pods):
            if limited.status:
                return ConditionState("Progressing", False, "ScalingLimited", limited.message)
            return ConditionState("Progressing", True, "Scaling", f"{role} instances start or end")
    return ConditionState("Progressing", False, "Settled", "all instances are as desired")


def _explain_replacement(pods: Sequence[ObservedPod], pool: InstancePool | None) -> str:
    if pool is None:
        return "no longer planned"
    revision = pool.spec.revision
    if all(pod.spec_revision == revision for pod in pods):
        return "replaced by instances with the weights that were read last"
    return f"replaced by revision {revision}"


def _build_degraded(
    view: DeploymentView, desired: Pools, available: ConditionState
) -> ConditionState:
    """Whether fewer instances serve than planned, or writes or instances keep failing."""
    if view.fault:
        return ConditionState("Degraded", True, "Failed", view.fault)
    if degraded := _find_true_in_pools(view, "Degraded"):
        return degraded
    if fault := _find_gateway_fault(view):
        return ConditionState("Degraded", True, conditions.NOT_STARTING, f"gateway: {fault}")
    if failing := _find_failing_engine(view):
        return ConditionState("Degraded", True, "EngineFailed", failing)
    missing = [
        role
        for role, pool in desired.items()
        if sum(pod.ready for pod in view.list_alive(role)) < pool.spec.replicas
    ]
    if available.status and missing:
        text = f"instances are missing: {', '.join(missing)}"
        return ConditionState("Degraded", True, "TooFew", text)
    return ConditionState("Degraded", False, "Complete", "no instance is missing")
