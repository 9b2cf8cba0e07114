"""Which GPUs are left for the plan of each deployment: those that no other one claims.

Used by the controller, while the planner's process is held: plans are made one after the other, and
each counts the GPUs of those before it. A finished plan is reserved until a reconcile has applied
it; from then on its pools claim the same. Everything else follows from cached objects, so a
restarted operator knows it, too.
"""

from collections.abc import Callable, Iterator, Sequence

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool, ReplicasOwner
from cleave.controller.cluster.cache import DEPLOYMENTS, POOLS, ObjectCache, ResourceKey
from cleave.controller.cluster.gpu_claims import (
    FreeGpus,
    GpuClaims,
    QuotaShare,
    has_freed,
    subtract_claims,
    sum_claims,
)
from cleave.controller.cluster.objects import ObservedNode, ObservedPod
from cleave.controller.replan.inputs import read_placement
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_pools
from cleave.manifests.resources import Device
from cleave.manifests.topology import NodeTopology
from cleave.planner.placement import PlanError, choose_placement


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
        self._claims: dict[ResourceKey, GpuClaims] = {}
        """By deployment, also of pools that name one which does not exist."""
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
            now = sum_claims(self._list_pools(deployment), self._device)
            before = self._claims.pop(deployment, GpuClaims())
            if now.placed or now.waiting:
                self._claims[deployment] = now
            if now != before:
                self._has_gained |= has_freed(before, now)
                # Sums and differences of Counters have no zeros.
                self._total = GpuClaims(
                    self._total.placed - before.placed + now.placed,
                    self._total.waiting - before.waiting + now.waiting,
                )

    def find_free(self, deployment: ResourceKey, nodes: Sequence[ObservedNode]) -> FreeGpus:
        """Return what the other deployments leave of these GPU nodes."""
        self._refresh()
        own = self._claims.get(deployment, GpuClaims())
        others = GpuClaims(self._total.placed - own.placed, self._total.waiting - own.waiting)
        return subtract_claims(nodes, others)

    def find_quota(self, deployment: ResourceKey) -> QuotaShare | None:
        """Return what the other deployments of its namespace leave of the ResourceQuota for GPUs;
        None: there is none."""
        self._refresh()
        quota = self._cache.find_gpu_quota(deployment.namespace)
        if quota is None:
            return None
        claimed = sum(
            claims.count_gpus()
            for key, claims in self._claims.items()
            if key.namespace == deployment.namespace and key != deployment
        )
        return QuotaShare(quota.name, max(0, quota.num_gpus - claimed), quota.num_gpus)

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
            for pool in self._build_pools(cached.resource, plan, is_new=not pools):
                before = pools.get(pool.name)
                if before is None or before.spec.owner is ReplicasOwner.PLAN:
                    pools[pool.name] = pool
        for name, pool in pools.items():
            yield pool, self._cache.list_pods(ResourceKey(POOLS, key.namespace, name))

    def _build_pools(
        self, deployment: LLMDeployment, plan: Manifest | None, *, is_new: bool
    ) -> list[InstancePool]:
        """The pools that the next reconcile will apply; none where the present ones stay.
        `is_new`: it has none."""
        spec = deployment.spec
        if deployment.metadata.deletion_timestamp is not None or spec.paused:
            return []
        try:
            if plan is not None:
                placement = read_placement(plan)
            elif is_new and spec.placement is not None:
                placement = choose_placement(deployment, reads_files=False)
            else:
                return []
            return build_pools(deployment, placement, self._get_topology(deployment))
        except (ValueError, PlanError):
            # A later version wrote the plan; or the spec is faulty, or needs more nodes than a pool
            # may have, and nothing starts. Other deployments must not learn of it.
            return []
