"""Whether a deployment answers requests, and whether its spec is rolled out. Pure.

Called for an LLMDeployment's status. Available: requests are answered, by instances of whichever
spec. Ready: besides, the generation of the spec that status speaks of has been rolled out. What is
hard: that has to be remembered (`status.rolledOutGeneration`). A generation stays rolled out when
instances are lost, follow traffic or are replaced because of another plan; a new generation is not
rolled out, however well the instances of the last one serve.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cleave.api.deployment import Fallback
from cleave.api.planning import Mode
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.api.role import Role
from cleave.controller import conditions
from cleave.controller.conditions import Condition
from cleave.controller.instances import Instance
from cleave.controller.placing import Decision
from cleave.pods.labels import gateway_name
from cleave.rpc.fleet_page import MAX_INSTANCES

if TYPE_CHECKING:
    from cleave.controller.deployment import DeploymentView

Goals = Mapping[Role, InstancePool]

ASLEEP = "ScaledToZero"
"""The reason of what is True although no instance runs."""


def available(
    view: "DeploymentView", goals: Goals, parts: Sequence[Condition], plan: Condition
) -> Condition:
    """Whether requests are answered; `parts`: what is said of each role and of the gateway."""
    *roles, gateway = parts
    if not roles:
        text = plan.message or "no instance is planned yet"
        return Condition("Available", False, plan.reason, text)
    if gateway.status and all(each.reason == ASLEEP for each in roles):
        text = "no instance runs; the next request waits until they are back"
        return Condition("Available", True, ASLEEP, text)
    if gateway.status and _answer(view, goals):
        return Condition("Available", True, "Serving", "requests are served")
    missing = [each for each in parts if not each.status] or [
        each for each in roles if each.reason == ASLEEP and each.type != "MixedReady"
    ]
    if not missing:
        text = "the prefill and decode instances that are ready are of different revisions"
        return Condition("Available", False, "NoPairReady", text)
    reason = missing[0].type.removesuffix("Ready") + "NotReady"
    return Condition("Available", False, reason, "; ".join(each.message for each in missing))


def find_rolled_out(view: "DeploymentView", goals: Goals, *, is_applied: bool) -> int | None:
    """The latest generation that has been rolled out completely; None: none has.

    The present one has when nothing is left to apply (`is_applied`), every pool and the gateways
    are complete, and the gateways send requests to the instances.
    """
    generation, before = view.deployment.metadata.generation or 0, _remembered(view)
    if before == generation or not (is_applied and goals):
        return before
    pools = {pool.spec.role: pool for pool in view.pools}
    is_complete = (
        all(role in pools and _is_complete(view, pools[role]) for role in goals)
        and _is_gateway_complete(view)
        and _is_sent_requests(view, goals)
    )
    return generation if is_complete else before


def unfinished(
    view: "DeploymentView", decision: Decision, progressing: Condition, *, is_applied: bool
) -> Condition:
    """Why the generation is not rolled out while requests are answered."""
    spec, plan = view.deployment.spec, decision.conditions[0]
    is_advisory = spec.planning.mode is Mode.ADVISORY
    if spec.paused:
        why = progressing.reason, progressing.message
    elif decision.placement is None and not is_advisory:
        why = plan.reason, plan.message
    elif decision.placement is None and not is_applied:
        why = "NotApplied", "planning.mode Advisory: instances stay as they are"
    elif progressing.reason in (conditions.ROLLING_OUT, "Scaling", "ScalingLimited"):
        why = progressing.reason, progressing.message
    else:
        why = conditions.ROLLING_OUT, "not every instance and gateway of it is ready"
    reason, text = why
    generation = view.deployment.metadata.generation
    return Condition("Ready", False, reason, f"generation {generation} is not rolled out: {text}")


def is_gateway_updated(view: "DeploymentView") -> bool:
    """Whether all gateways, and no others, are of what was applied last; so it is before any is."""
    child = view.children.get(("Deployment", gateway_name(view.deployment.name)))
    return child is None or child.is_updated


def _answer(view: "DeploymentView", goals: Goals) -> bool:
    """Whether instances of one revision answer requests: a mixed one, or one of each other role.

    With routing.fallback Always an instance of either role does both phases while the other role is
    scaled to 0.
    """
    roles: dict[str, set[Role]] = {}
    for pod in view.pods:
        if pod.ready and not (pod.deleting or pod.is_over):
            roles.setdefault(pod.revision, set()).add(pod.role)
    pair = {Role.DECODE} | ({Role.PREFILL} & goals.keys())
    if view.deployment.spec.routing.fallback is Fallback.ALWAYS:
        pair -= {role for role, goal in goals.items() if goal.spec.replicas == 0}
    return any(Role.MIXED in found or (pair and pair <= found) for found in roles.values())


def _remembered(view: "DeploymentView") -> int | None:
    generation: int | None = view.status.get("rolledOutGeneration")
    if generation is None and (ready := conditions.find(view.status, "Ready")):
        # Written by an operator that did not know rolledOutGeneration.
        generation = ready.get("observedGeneration") if ready["status"] == "True" else None
    return generation


def _is_complete(view: "DeploymentView", pool: InstancePool) -> bool:
    """Whether a pool has all its instances, ready, of its present spec and of no other.

    One of them is enough where an autoscaler, a person or traffic sets the number: it may be more
    than nodes have room for, and change before it is reached.
    """
    status, role = view.pool_status.get(pool.spec.role, {}), pool.spec.role
    ready = conditions.find(status, "Ready")
    is_current = status.get("observedGeneration") == (pool.metadata.generation or 0)
    if ready is None or pool.spec.rollout is not None or not is_current:
        return False
    if ready["status"] == "True":
        return True
    follows = any(each.role is role for each in view.deployment.spec.scaling.roles)
    is_plans = pool.spec.owner is ReplicasOwner.PLAN and not follows
    has_old = ready["reason"] == conditions.ROLLING_OUT
    return not (is_plans or has_old) and status["ready"] > 0


def _is_gateway_complete(view: "DeploymentView") -> bool:
    child = view.children.get(("Deployment", gateway_name(view.deployment.name)))
    if child is None:
        return False
    return child.is_updated and child.ready >= view.deployment.spec.gateway.replicas


def _is_sent_requests(view: "DeploymentView", goals: Goals) -> bool:
    """Whether gateways send requests to an instance of each role; True while no gateway answers."""
    if view.instances is None:
        return True
    is_split = view.deployment.spec.routing.fallback is not Fallback.ALWAYS
    # A full page may leave out all instances of a role.
    is_full = len(view.instances) >= MAX_INSTANCES
    for role, goal in goals.items():
        names = (pod.name for pod in view.alive(role) if pod.ready)
        known = [view.instances[name] for name in names if name in view.instances]
        if goal.spec.replicas == 0 or (is_full and not known):
            continue
        needs_kv = is_split and role is not Role.MIXED
        if not any(_takes(each, needs_kv=needs_kv) for each in known):
            return False
    return True


def _takes(instance: Instance, *, needs_kv: bool) -> bool:
    return instance.selectable and (instance.kv_path.verified or not needs_kv)
