"""Moves the only instance of a pool off a cordoned node, its replacement first. Pure.

Called by the pool's reconcile. `kubectl drain` cordons a node and evicts its pods in the same
moment, so the pool's disruption budget keeps the last instance beforehand. The operator deletes it
once a replacement is ready elsewhere; the drain, which tries again, finds it gone. Where no node
has room for a replacement, the budget lets the instance go: the drain must not wait for ever.

Instances that span nodes, and those that must share a node with others, are evicted as they come.
"""

from dataclasses import dataclass, replace

from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.pool.unschedulable import SchedulingLimit
from cleave.controller.rollout.planner import RolloutStep
from cleave.controller.views import PoolInstances, PoolView


@dataclass(frozen=True, slots=True)
class Relocation:
    """The only instance is on a cordoned node."""

    leaving: ObservedPod
    is_replaced: bool
    """Whether another instance is ready on a node that takes pods."""


def keeps_last_instance(view: PoolView) -> bool:
    """Whether the pool's only instance gets a replacement before it is evicted."""
    spec = view.pool.spec
    return spec.replicas == 1 and spec.nodes == 1 and spec.colocation is None


def find_relocation(view: PoolView, fleet: PoolInstances, target: RolloutStep) -> Relocation | None:
    """The relocation that is due; None in a rollout, which replaces the instance anyway."""
    if not keeps_last_instance(view) or target != RolloutStep(new=1, old=0) or fleet.old:
        return None
    ready = [pod for pod in fleet.new if pod.ready and not pod.deleting]
    leaving = [pod for pod in ready if _is_cordoned(pod, view)]
    if not leaving:
        return None
    return Relocation(leaving[0], is_replaced=len(ready) > len(leaving))


def explain_limit(limit: SchedulingLimit, relocation: Relocation | None) -> SchedulingLimit:
    """The limit, whose message says what a lack of room means for the node's drain."""
    if relocation is None or not limit.reason:
        return limit
    text = f"the only instance may be evicted from the cordoned node {relocation.leaving.node}"
    return replace(limit, reason=f"{text} without a replacement: {limit.reason}")


def _is_cordoned(pod: ObservedPod, view: PoolView) -> bool:
    node = view.nodes.get(pod.node)
    return node is not None and not node.schedulable
