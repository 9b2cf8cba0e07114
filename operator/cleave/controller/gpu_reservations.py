"""Which GPUs are left for the plan of each deployment: those that no other one claims, and those
that one of lower priority lends.

Used by the controller, while the planner's process is held: plans are made one after the other, and
each counts the GPUs of those before it. A finished plan is reserved until a reconcile has applied
it; from then on its pools claim the same. Everything else follows from cached objects, so a
restarted operator knows it, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from cleave.api.deployment import LLMDeployment
from cleave.api.planning import PlanningMode
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.controller.cluster import gpu_lending
from cleave.controller.cluster.cache import DEPLOYMENTS, POOLS, ObjectCache, ResourceKey
from cleave.controller.cluster.gpu_claims import (
    FreeGpus,
    GpuClaims,
    QuotaShare,
    has_freed,
    subtract_claims,
)
from cleave.controller.cluster.gpu_lending import GpuRoom, GpuShare
from cleave.controller.cluster.objects import ObservedNode, ObservedPod
from cleave.controller.replan.inputs import read_placement
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_pools
from cleave.manifests.resources import Device
from cleave.manifests.topology import NodeTopology
from cleave.planner.placement import PlanError, choose_placement
from cleave.planner.resolved_deployment import ResolvedDeployment

Reclaimed = Mapping[ResourceKey, frozenset[str]]
"""Names of instances by deployment."""


class GpuReservations:
    """The claims of all deployments, kept up to date by what has changed."""

    def __init__(
        self,
        cache: ObjectCache,
        device: Device,
        get_topology: Callable[[LLMDeployment], NodeTopology],
    ) -> None:
        """`get_topology`: of the nodes that a deployment's engines can run on."""
        self._cache, self._device, self._get_topology = cache, device, get_topology
        self._total = GpuClaims()
        self._shares: dict[ResourceKey, GpuShare] = {}
        """By deployment, also of pools that name one which does not exist."""
        self._lenders: set[ResourceKey] = set()
        self._reclaimed: tuple[Sequence[ObservedNode], Mapping[str, int], Reclaimed] | None = None
        """Instances, with the nodes and quotas they follow from; None: claims have changed."""
        self._listed: Reclaimed = {}
        """What `list_lenders` has seen."""
        self._plans: dict[ResourceKey, Manifest] = {}
        self._stale: set[ResourceKey] = set()
        self._has_gained = False
        self._deployments: dict[ResourceKey, ResourceKey] = {}
        """The deployment of each pool."""

    def mark_changed(self, key: ResourceKey) -> None:
        """Compute the claims of a changed, new or deleted deployment or pool again."""
        self._stale.add(self._find_deployment(key))

    def reserve(self, deployment: ResourceKey, plan: Manifest) -> None:
        """Reserve the GPUs of a finished plan, in the form of `status.plan`."""
        self._plans[deployment] = plan
        self._stale.add(deployment)

    def get_plan(self, deployment: ResourceKey) -> Manifest | None:
        """Return the plan that is not applied yet."""
        return self._plans.get(deployment)

    def release(self, deployment: ResourceKey, plan: Manifest | None) -> None:
        """Drop the reservation of a plan that a reconcile has taken up; a newer one stays."""
        if plan is not None and self._plans.get(deployment) is plan:
            del self._plans[deployment]
            self._stale.add(deployment)

    def take_gain(self) -> bool:
        """Return whether a deployment has given GPUs back since the last call."""
        self._refresh()
        has_gained, self._has_gained = self._has_gained, False
        return has_gained

    def _refresh(self) -> None:
        while self._stale:
            deployment = self._stale.pop()
            now = self._build_share(deployment)
            before = self._shares.pop(deployment, GpuShare())
            self._lenders.discard(deployment)
            if now.claims.placed or now.claims.waiting or now.instances:
                self._shares[deployment] = now
                if now.min_gpus is not None:
                    self._lenders.add(deployment)
            if now != before:
                self._reclaimed = None
                self._has_gained |= has_freed(before.claims, now.claims)
                self._has_gained |= has_freed(before.guaranteed, now.guaranteed)
                # Sums and differences of Counters have no zeros.
                self._total = GpuClaims(
                    self._total.placed - before.claims.placed + now.claims.placed,
                    self._total.waiting - before.claims.waiting + now.claims.waiting,
                )

    def find_free(self, deployment: ResourceKey, nodes: Sequence[ObservedNode]) -> FreeGpus:
        """Return what the other deployments leave of these GPU nodes."""
        self._refresh()
        own = self._shares.get(deployment, GpuShare()).claims
        placed, waiting = self._total.placed - own.placed, self._total.waiting - own.waiting
        for key in self._list_lower(deployment):
            share = self._shares[key]
            placed = placed - share.claims.placed + share.guaranteed.placed
            waiting = waiting - share.claims.waiting + share.guaranteed.waiting
        return subtract_claims(nodes, GpuClaims(placed, waiting))

    def find_quota(self, deployment: ResourceKey) -> QuotaShare | None:
        """Return what the other deployments of its namespace leave of the ResourceQuota for GPUs;
        None: there is none."""
        self._refresh()
        quota = self._cache.find_gpu_quota(deployment.namespace)
        if quota is None:
            return None
        lower = {*self._list_lower(deployment)}
        claimed = sum(
            (share.guaranteed if key in lower else share.claims).count_gpus()
            for key, share in self._shares.items()
            if key.namespace == deployment.namespace and key != deployment
        )
        return QuotaShare(quota.name, max(0, quota.num_gpus - claimed), quota.num_gpus)

    def find_room(self, deployment: ResourceKey, nodes: Sequence[ObservedNode]) -> GpuRoom | None:
        """Return what deployments of higher priority leave to one that lends; None: it does not, or
        there are none."""
        reclaimed = self._find_reclaimed(nodes)
        if deployment not in self._lenders:
            return None
        quota = self._cache.find_gpu_quota(deployment.namespace)
        num_gpus = None if quota is None else quota.num_gpus
        return gpu_lending.find_room(deployment, nodes, self._shares, reclaimed, num_gpus)

    def get_reclaimed(
        self, deployment: ResourceKey, nodes: Sequence[ObservedNode]
    ) -> frozenset[str]:
        """Return the names of the instances that deployments of higher priority reclaim."""
        return self._find_reclaimed(nodes).get(deployment, frozenset())

    def list_lenders(self, nodes: Sequence[ObservedNode]) -> list[ResourceKey]:
        """Return the deployments of which other instances are reclaimed than at the last call."""
        now, before = self._find_reclaimed(nodes), self._listed
        self._listed = now
        return [key for key in {**before, **now} if now.get(key) != before.get(key)]

    def _find_reclaimed(self, nodes: Sequence[ObservedNode]) -> Reclaimed:
        self._refresh()
        if not self._lenders:
            return {}
        found = {key.namespace: self._cache.find_gpu_quota(key.namespace) for key in self._shares}
        quotas = {name: quota.num_gpus for name, quota in found.items() if quota is not None}
        if self._reclaimed is None or self._reclaimed[:2] != (nodes, quotas):
            found_now = gpu_lending.find_reclaimed(nodes, self._shares, quotas)
            self._reclaimed = nodes, quotas, found_now
        return self._reclaimed[2]

    def _list_lower(self, deployment: ResourceKey) -> Iterator[ResourceKey]:
        """Yield the other deployments that lend to this one."""
        priority = self._get_priority(deployment)
        for key in self._lenders - {deployment}:
            if self._shares[key].priority < priority:
                yield key

    def _get_priority(self, deployment: ResourceKey) -> int:
        cached = self._cache.get(deployment)
        resource = cached.resource if cached is not None else None
        return resource.spec.planning.priority or 0 if isinstance(resource, LLMDeployment) else 0

    def _build_share(self, key: ResourceKey) -> GpuShare:
        pools = [*self._list_pools(key)]
        priority, min_gpus = self._get_priority(key), self._get_min_gpus(key)
        if any(pool.spec.owner is not ReplicasOwner.PLAN for pool, _ in pools):
            min_gpus = None
        return gpu_lending.build_share(pools, self._device, priority, min_gpus)

    def _get_min_gpus(self, key: ResourceKey) -> int | None:
        """`spec.planning.minGPUs` of a deployment whose instances may be changed now; else None."""
        cached = self._cache.get(key)
        resource = cached.resource if cached is not None else None
        if not isinstance(resource, LLMDeployment) or resource.spec.paused:
            return None
        planning, is_leaving = resource.spec.planning, resource.metadata.deletion_timestamp
        is_advisory = planning.mode is PlanningMode.ADVISORY
        return None if is_advisory or is_leaving is not None else planning.min_gpus

    def _find_deployment(self, key: ResourceKey) -> ResourceKey:
        if key.kind == DEPLOYMENTS:
            return key
        cached = self._cache.get(key)
        if cached is None:
            return self._deployments.pop(key, key)
        if isinstance(cached.resource, InstancePool):
            name = cached.resource.spec.deployment
            self._deployments[key] = ResourceKey(DEPLOYMENTS, key.namespace, name)
        return self._deployments.get(key, key)

    def _list_pools(
        self, key: ResourceKey
    ) -> Iterator[tuple[InstancePool, tuple[ObservedPod, ...]]]:
        """Yield the pools of a deployment as they will be once its plan is applied, with their
        pods."""
        cached = self._cache.get(key)
        pools = {
            each.resource.name: each.resource
            for each in self._cache.list_pools(key)
            if isinstance(each.resource, InstancePool)
        }
        if cached is not None and isinstance(cached.resource, LLMDeployment):
            plan = self._plans.get(key) or (None if pools else cached.status.get("plan"))
            for pool in self._build_pools(cached.resolved, plan, is_new=not pools):
                before = pools.get(pool.name)
                if before is None or before.spec.owner is ReplicasOwner.PLAN:
                    pools[pool.name] = pool
        for name, pool in pools.items():
            yield pool, self._cache.list_pods(ResourceKey(POOLS, key.namespace, name))

    def _build_pools(
        self, resolved: ResolvedDeployment, plan: Manifest | None, *, is_new: bool
    ) -> list[InstancePool]:
        """The pools that the next reconcile will apply; none where the present ones stay.
        `is_new`: it has none."""
        spec = resolved.spec
        if resolved.written.metadata.deletion_timestamp is not None or spec.paused:
            return []
        try:
            if plan is not None:
                placement = read_placement(plan)
            elif is_new and spec.placement is not None:
                placement = choose_placement(resolved)
            else:
                return []
            return build_pools(resolved, placement, self._get_topology(resolved.written))
        except (ValueError, PlanError):
            # A later version wrote the plan; or the spec is faulty, or needs more nodes than a pool
            # may have, and nothing starts. Other deployments must not learn of it.
            return []
