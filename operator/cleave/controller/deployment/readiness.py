"""Whether a deployment serves requests, and whether its spec is rolled out. Pure.

Called for the status of an LLMDeployment. Available: requests are served, by instances of any
generation. Ready: requests are served, and the observed generation of the spec is rolled out. A
completed rollout has to be recorded (`status.rolledOutGeneration`). A generation stays rolled out
when instances are lost, are scaled or are replaced because of a new plan; a new generation is not
rolled out, even if the instances of the previous one serve.
"""

from collections.abc import Sequence

from cleave.api.enums import FallbackPolicy
from cleave.api.planning import PlanningMode
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.api.role import Role
from cleave.controller.cluster import conditions
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.deployment.placement import PlacementDecision
from cleave.controller.views import DeploymentView, Pools
from cleave.rpc.fleet_status import MAX_INSTANCES

SCALED_TO_ZERO = "ScaledToZero"
"""Reason of conditions that are True although no instance runs."""


def build_available(
    view: DeploymentView, desired: Pools, parts: Sequence[ConditionState], plan: ConditionState
) -> ConditionState:
    """The Available condition; `parts`: the conditions of each role and of the gateway."""
    *roles, gateway = parts
    if not roles:
        text = plan.message or "no instance is planned yet"
        return ConditionState("Available", False, plan.reason, text)
    if gateway.status and all(each.reason == SCALED_TO_ZERO for each in roles):
        text = "no instance runs; the next request waits until they are back"
        return ConditionState("Available", True, SCALED_TO_ZERO, text)
    if gateway.status and _can_serve(view, desired):
        return ConditionState("Available", True, "Serving", "requests are served")
    missing = [each for each in parts if not each.status] or [
        each for each in roles if each.reason == SCALED_TO_ZERO and each.type != "MixedReady"
    ]
    if not missing:
        text = "the prefill and decode instances that are ready are of different revisions"
        return ConditionState("Available", False, "NoPairReady", text)
    reason = missing[0].type.removesuffix("Ready") + "NotReady"
    return ConditionState("Available", False, reason, "; ".join(each.message for each in missing))


def find_rolled_out_generation(
    view: DeploymentView, desired: Pools, *, is_applied: bool
) -> int | None:
    """Return the latest generation whose rollout is complete; None: none is.

    The present generation is complete when nothing is left to apply (`is_applied`), every pool and
    the gateways are complete, and the gateways send requests to the instances.
    """
    generation = view.deployment.metadata.generation or 0
    recorded = _read_rolled_out_generation(view)
    if recorded == generation or not (is_applied and desired):
        return recorded
    pools = view.pools_by_role
    is_complete = (
        all(role in pools and _is_complete(view, pools[role]) for role in desired)
        and _is_gateway_complete(view)
        and _is_sent_requests(view, desired)
    )
    return generation if is_complete else recorded


def build_not_rolled_out(
    view: DeploymentView, decision: PlacementDecision, progress: ConditionState, *, is_applied: bool
) -> ConditionState:
    """The Ready condition while requests are served and the generation is not rolled out."""
    spec, plan = view.deployment.spec, decision.conditions[0]
    is_advisory = spec.planning.mode is PlanningMode.ADVISORY
    if spec.paused:
        why = progress.reason, progress.message
    elif decision.placement is None and not is_advisory:
        why = plan.reason, plan.message
    elif decision.placement is None and not is_applied:
        why = "NotApplied", "planning.mode Advisory: instances stay as they are"
    elif progress.reason in (conditions.ROLLING_OUT, "Scaling", "ScalingLimited"):
        why = progress.reason, progress.message
    else:
        why = conditions.ROLLING_OUT, "not every instance and gateway of it is ready"
    reason, text = why
    text = f"generation {view.deployment.metadata.generation} is not rolled out: {text}"
    return ConditionState("Ready", False, reason, text)


def is_gateway_updated(view: DeploymentView) -> bool:
    """Whether all gateway pods are of the applied spec; True before any gateway exists."""
    return view.gateway is None or view.gateway.is_updated


def _can_serve(view: DeploymentView, desired: Pools) -> bool:
    """Whether instances of one revision can serve: a mixed one, or prefill and decode together.

    With routing.fallback Always an instance serves both phases while the other role is at 0.
    """
    roles: dict[str, set[Role]] = {}
    for pod in view.pods:
        if pod.ready and pod.is_alive:
            roles.setdefault(pod.revision, set()).add(pod.role)
    pair = {Role.DECODE} | ({Role.PREFILL} & desired.keys())
    if view.deployment.spec.routing.fallback is FallbackPolicy.ALWAYS:
        pair -= {role for role, desired_pool in desired.items() if desired_pool.spec.replicas == 0}
    return any(Role.MIXED in serving or (pair and pair <= serving) for serving in roles.values())


def _read_rolled_out_generation(view: DeploymentView) -> int | None:
    generation: int | None = view.status.get("rolledOutGeneration")
    if generation is None and (ready := conditions.find(view.status, "Ready")):
        # The status was written by a version of the operator without rolledOutGeneration.
        generation = ready.get("observedGeneration") if ready["status"] == "True" else None
    return generation


def _is_complete(view: DeploymentView, pool: InstancePool) -> bool:
    """Whether a pool has all its instances, ready, of its present spec and of no other.

    One instance suffices where an autoscaler, a person or traffic sets the number: it may be more
    than nodes have room for, and may change before it is reached.
    """
    status, role = view.pool_status.get(pool.spec.role, {}), pool.spec.role
    ready = conditions.find(status, "Ready")
    is_current = status.get("observedGeneration") == (pool.metadata.generation or 0)
    if ready is None or pool.spec.rollout is not None or not is_current:
        return False
    if ready["status"] == "True":
        return True
    roles = {role, *(member.role for member in pool.spec.members)}
    is_scaled = any(each.role in roles for each in view.deployment.spec.scaling.roles)
    is_plans = pool.spec.owner is ReplicasOwner.PLAN and not is_scaled
    has_old = ready["reason"] == conditions.ROLLING_OUT
    return not (is_plans or has_old) and status["ready"] > 0


def _is_gateway_complete(view: DeploymentView) -> bool:
    count, gateway = view.deployment.spec.gateway.replicas, view.gateway
    return gateway is not None and gateway.is_updated and gateway.ready >= count


def _is_sent_requests(view: DeploymentView, desired: Pools) -> bool:
    """Whether gateways send requests to an instance of each role; True if none responds."""
    if view.instances is None:
        return True
    needs_both = view.deployment.spec.routing.fallback is not FallbackPolicy.ALWAYS
    # A response of the most instances may leave out all those of a role.
    is_full = len(view.instances) >= MAX_INSTANCES
    for role, pool in desired.items():
        names = (pod.name for pod in view.list_alive(role) if pod.ready)
        reported = [view.instances[name] for name in names if name in view.instances]
        if pool.spec.replicas == 0 or (is_full and not reported):
            continue
        needs_kv = needs_both and role is not Role.MIXED
        if not any(i.selectable and (i.kv_path.verified or not needs_kv) for i in reported):
            return False
    return True
