"""Reconcile of an InstancePool: from what is there to what is to be done. Pure.

Called by the controller for every pool, also one that was made by hand. What is hard: what is seen
may be a moment old. Names of new pods follow from the pool and the names that are taken, so that
the same decision taken twice makes the same pods once; deletions name the very pod.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cleave.api.engine import DeletionPolicy
from cleave.api.pool import InstancePool
from cleave.controller import observed, pool_pods, pool_status, wanted
from cleave.controller.actions import Action, Delete, Reference, Requeue, SetFinalizers
from cleave.controller.observed import ObservedNode, ObservedPod
from cleave.controller.pending import Limit, limit
from cleave.controller.rollout import RoleState, RolloutLimits, Step, next_step
from cleave.controller.settings import Settings
from cleave.controller.shrink import choose_victims
from cleave.controller.wanted import FINALIZER, Children
from cleave.pods.budget import disruption_budget
from cleave.pods.discovery import role_binding, service_account, workers_service
from cleave.pods.labels import Manifest

_LIMITS = RolloutLimits(max_surge=1, max_unavailable=0)
"""Of a pool that replaces its pods by itself."""
_SLACK_S = 60
"""How long after their grace pods may still be seen."""
_AT_ONCE_S = 1
_MOST_AT_ONCE = 500
"""Instances made before the pool is looked at again: it may have changed meanwhile."""


@dataclass(frozen=True)
class PoolView:
    """A pool and what belongs to it. What follows from it is worked out once."""

    pool: InstancePool
    """With the metadata that the API server wrote; without its status."""
    now_s: float
    status: Manifest = field(default_factory=dict)
    """As it was written last."""
    pods: tuple[ObservedPod, ...] = ()
    """All pods, also those of which an instance has several."""
    taken: frozenset[str] = frozenset()
    """Names of instances of the deployment, in whichever pool they are now."""
    children: Children = field(default_factory=dict)
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)
    numbers: str = ""
    """Digest of what nodes offer."""
    serving: int | None = None
    """Instances that take requests, as the gateways say; None: nobody said."""
    fault: str = ""
    """Why what was wanted last could not be made."""
    settings: Settings = Settings()  # noqa: RUF009 - a frozen value

    @cached_property
    def instances(self) -> list[ObservedPod]:
        """One per instance, those that are going included."""
        return observed.instances(self.pods, self.pool.spec.nodes)

    @cached_property
    def template(self) -> str:
        """Digest of what the pool's pods are made from now."""
        return wanted.template(self.pool)

    @cached_property
    def parts(self) -> Mapping[str, Sequence[ObservedPod]]:
        """The pods of each instance, by its name."""
        found: dict[str, list[ObservedPod]] = {}
        for pod in self.pods:
            found.setdefault(pod.instance or pod.name, []).append(pod)
        return found


@dataclass(frozen=True, slots=True)
class Fleet:
    """The instances that count: neither going nor over."""

    new: tuple[ObservedPod, ...]
    """As the pool asks for them now."""
    old: tuple[ObservedPod, ...]

    @property
    def all(self) -> tuple[ObservedPod, ...]:
        """Both."""
        return self.new + self.old

    @property
    def ready(self) -> int:
        """Those of both that are ready."""
        return sum(pod.ready for pod in self.all)


def reconcile(view: PoolView) -> list[Action]:
    """What to do next; nothing when all is as it is wanted."""
    pool = view.pool
    if pool.metadata.deletion_timestamp is not None:
        return list(_deleting(view))
    actions: list[Action] = []
    if FINALIZER not in pool.metadata.finalizers:
        actions.append(_finalizers(pool, (*pool.metadata.finalizers, FINALIZER)))
    fleet = _fleet(view)
    target = _target(view, fleet)
    limited = limit(
        target.new,
        fleet.new,
        now_s=view.now_s,
        timeout_s=pool.spec.pending_timeout_s,
        # A change of the pool, such as the roll-out's next step, begins a trial as well.
        nodes=f"{view.numbers}/{pool.metadata.generation or 0}",
        last=pool_status.trial(view.status),
    )
    # Told first: whatever cannot be made, people learn what there is.
    actions += pool_status.report(view, fleet, target, limited)
    actions += wanted.changed(_fixed(view), pool, view.children)
    actions += _buried(view)
    actions += _resized(view, fleet, target, limited)
    if limited.again_after_s is not None:
        actions.append(Requeue(limited.again_after_s))
    return actions


def _fixed(view: PoolView) -> list[Manifest]:
    """What a pool has however many instances; one by hand also has what a deployment would make."""
    pool = view.pool
    budget = disruption_budget(pool)
    if pool.metadata.owner_references:
        return [budget]
    role = view.settings.discovery_role
    return [service_account(pool), role_binding(pool, role), workers_service(pool), budget]


def _fleet(view: PoolView) -> Fleet:
    new: list[ObservedPod] = []
    old: list[ObservedPod] = []
    for pod in view.instances:
        if not (pod.deleting or pod.is_over):
            (new if _is_new(pod, view) else old).append(pod)
    return Fleet(tuple(new), tuple(old))


def _is_new(pod: ObservedPod, view: PoolView) -> bool:
    """Whether it is what the pool asks for now.

    While the deployment rolls out, revisions count: they are what prefill and decode must share.
    Otherwise everything that a pod is made from does.
    """
    spec = view.pool.spec
    if spec.rollout is not None:
        return pod.revision == spec.revision
    return pod.template == view.template


def _target(view: PoolView, fleet: Fleet) -> Step:
    """How many instances to keep now."""
    spec = view.pool.spec
    if spec.rollout is not None:
        return Step(spec.rollout.new, spec.rollout.old, spec.rollout.older)
    if not fleet.old:
        return Step(new=spec.replicas, old=0)
    state = RoleState(
        replicas=spec.replicas,
        old=len(fleet.old),
        old_ready=sum(pod.ready for pod in fleet.old),
        new=len(fleet.new),
        new_ready=sum(pod.ready for pod in fleet.new),
        leaving=sum(pod.deleting for pod in view.instances),
    )
    return next_step({spec.role: state}, _LIMITS)[spec.role]


def _resized(view: PoolView, fleet: Fleet, target: Step, limited: Limit) -> Iterator[Action]:
    """Pods to make, to complete and to delete."""
    given_up = {pod.name for pod in limited.give_up}
    stay = tuple(pod for pod in fleet.new if pod.name not in given_up)
    # A pool that the plan has dropped may keep some for a while, and makes none.
    most = min(target.new, view.pool.spec.replicas)
    if limited.most is not None:
        most = min(most, limited.most)
    yield from pool_pods.completed(view, stay)
    yield from pool_pods.created(view, fleet, min(_MOST_AT_ONCE, max(0, most - len(stay))))
    victims = [*limited.give_up, *choose_victims(stay, len(stay) - target.new)]
    for pods, keep in _older(fleet.old, target):
        victims += choose_victims(pods, len(pods) - keep)
    for victim in victims:
        yield from _deleted(view, victim)


def _older(old: tuple[ObservedPod, ...], target: Step) -> Iterator[tuple[list[ObservedPod], int]]:
    """Old instances and how many of them to keep, by revision where that is stated."""
    if not target.older:
        yield list(old), target.old
        return
    for revision in sorted({pod.revision for pod in old}):
        same = [pod for pod in old if pod.revision == revision]
        yield same, target.older.get(revision, 0)


def _deleted(view: PoolView, instance: ObservedPod, grace_s: int | None = None) -> Iterator[Delete]:
    """Every pod of an instance, or the set that would only make them again."""
    if instance.set_name:
        yield Delete(Reference("LeaderWorkerSet", instance.namespace, instance.set_name))
        return
    for pod in view.parts[instance.instance or instance.name]:
        if not pod.deleting:
            yield Delete(_reference(pod), grace_s)


def _buried(view: PoolView) -> Iterator[Delete]:
    """Instances that have ended, or a part of which goes, are replaced."""
    for instance in view.instances:
        # Where one pod of an instance goes, the others are of no use.
        if instance.is_over or instance.deleting:
            yield from _deleted(view, instance)
    yield from _forgotten(view)


def _forgotten(view: PoolView) -> Iterator[Delete]:
    """Pods of a lost node, after their grace."""
    for pod in view.pods:
        if _is_lost(pod, view):
            yield Delete(_reference(pod), grace_s=0)


def _is_lost(pod: ObservedPod, view: PoolView) -> bool:
    """Whether nobody is left who could say that it has ended."""
    node = view.nodes.get(pod.node)
    gone = bool(pod.node) and (node is None or not node.ready)
    return gone and pod.deleted_s is not None and pod.deleted_s < view.now_s


def _deleting(view: PoolView) -> Iterator[Action]:
    """Drain every pod, then let the pool go; it goes anyway when their time is over."""
    pool = view.pool
    if FINALIZER not in pool.metadata.finalizers:
        return
    grace = _AT_ONCE_S if pool.spec.deletion_policy is DeletionPolicy.IMMEDIATE else None
    for instance in view.instances:
        yield from _deleted(view, instance, grace)
    yield from _forgotten(view)
    asked_s = observed.seconds(pool.metadata.deletion_timestamp) or view.now_s
    left_s = asked_s + pool.spec.template.drain_timeout_s + _SLACK_S - view.now_s
    if not view.pods or left_s <= 0:
        kept = tuple(name for name in pool.metadata.finalizers if name != FINALIZER)
        yield _finalizers(pool, kept)
    else:
        yield Requeue(left_s)


def _finalizers(pool: InstancePool, names: tuple[str, ...]) -> SetFinalizers:
    return SetFinalizers(wanted.reference(pool), names, pool.metadata.resource_version or "")


def _reference(pod: ObservedPod) -> Reference:
    return Reference("Pod", pod.namespace, pod.name, pod.uid)
