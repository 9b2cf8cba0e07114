"""The controller: from cached objects to reconciles, and from reconciles to writes.

Each object is reconciled by one worker at a time. Decisions are made by `deployment.reconcile` and
`pool.reconcile`, writes by the executor. Workers run only while this operator leads; the cache is
filled all the time, so that a new leader can start at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller.cluster import instance_status, inventory, objects
from cleave.controller.cluster.actions import Action, Ask, Delete, Reference, Repurpose, Requeue
from cleave.controller.cluster.cache import DEPLOYMENTS, Key, Seen, Store
from cleave.controller.cluster.client import ApiError
from cleave.controller.cluster.executor import Executor, NotLeadingError, StaleError, TakenError
from cleave.controller.cluster.gateway_client import Fleets
from cleave.controller.cluster.instance_status import Instance
from cleave.controller.cluster.inventory import Inventory
from cleave.controller.cluster.workqueue import WorkQueue
from cleave.controller.deployment import invalid
from cleave.controller.deployment.reconcile import DeploymentView
from cleave.controller.deployment.reconcile import reconcile as reconcile_deployment
from cleave.controller.metrics import Metrics
from cleave.controller.pool.reconcile import PoolView
from cleave.controller.pool.reconcile import reconcile as reconcile_pool
from cleave.controller.replan.planner_process import Desk
from cleave.controller.settings import Settings
from cleave.controller.traffic_poller import Watching
from cleave.manifests.labels import Manifest

log = logging.getLogger(__name__)

WORKERS = 16
RESYNC_S = 60.0
CALM_S = 600.0
"""An object without changes, for which nothing had to be done, is reconciled again after this
time."""
SETTLE_S = 0.05
"""Delay before a changed object is reconciled: a starting pod, for example, causes five changes."""
_SHARE = 4.0
_LONGEST_SETTLE_S = 2.0
"""Large objects take long to reconcile, so they wait longer and handle more changes at a time:
`_SHARE` times the last decision, at most this long."""
_STALE_S = 0.2


class Controller:
    """Reconciles every LLMDeployment and InstancePool in the cache."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        fleets: Fleets[Key] | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.settings = settings
        """Read again for each decision."""
        self._metrics = metrics
        self._now, self._clock = now, clock
        self._settle_s = settle_s
        self.store = Store()
        self.queue: WorkQueue[Key] = WorkQueue(clock)
        self.desk: Desk[Key] = Desk(self._planned)
        self._fleets: Fleets[Key] = fleets or Fleets(clock)
        self.watching = Watching(self.store, self.queue.add, now)
        self._faults: dict[Key, str] = {}
        self._calm: dict[Key, float] = {}
        self._took: dict[Key, float] = {}
        self._moving: set[Key] = set()
        """Deployments with instances that are changing their role at this moment."""
        self._inventory: tuple[object, Inventory] | None = None

    def seen(self, manifest: Manifest) -> None:
        """Handle a new or changed object."""
        self._look_at(self.store.put(manifest))

    def gone(self, manifest: Manifest) -> None:
        """Handle a deleted object."""
        self._look_at(self.store.drop(manifest))

    def written_off(self, target: Reference) -> None:
        """Handle an object that is gone according to the response to a write."""
        meta = {"name": target.name, "namespace": target.namespace, "uid": target.uid}
        self.gone({"kind": target.kind, "metadata": meta})

    def lost(self, kind: str, listed: Mapping[tuple[str, str], str], version: int) -> int:
        """Forget objects of a kind that a list of this version lacks; returns how many."""
        before = self.store.count().get(kind, 0)
        self._look_at(self.store.missing(kind, listed, version))
        return before - self.store.count().get(kind, 0)

    async def work(self, executor: Executor, elected: asyncio.Event) -> None:
        """Reconcile one object after the other while this operator leads; never returns."""
        while True:
            await elected.wait()
            key = await self.queue.take()
            try:
                await self._reconcile(key, executor)
            finally:
                self.queue.done(key)

    async def resync(self, elected: asyncio.Event, period_s: float = RESYNC_S) -> None:
        """Enqueue idle objects periodically, and when this operator begins to lead."""
        while True:
            await elected.wait()
            self._look_at(set(self.due()))
            await asyncio.sleep(period_s)

    def due(self) -> Iterator[Key]:
        """Yield the objects to reconcile again although they have not changed."""
        now = self._clock()
        for key in self.store.resources():
            if now - self._calm.get(key, -CALM_S) >= CALM_S:
                yield key

    def statuses(self) -> dict[str, Manifest]:
        """Return the status of every deployment, by NAMESPACE/NAME."""
        cached = ((key, self.store.seen(key)) for key in self.store.resources())
        return {
            f"{key.namespace}/{key.name}": entry.status
            for key, entry in cached
            if entry is not None and key.kind == DEPLOYMENTS
        }

    def inventory(self) -> Inventory:
        """Return what the nodes offer; built again only when nodes have changed."""
        nodes = tuple(sorted(self.store.nodes.values(), key=lambda node: node.name))
        if self._inventory is None or self._inventory[0] != nodes:
            self._inventory = nodes, inventory.inventory(nodes, self.settings.cluster)
        return self._inventory[1]

    def _planned(self, key: Key) -> None:
        """Count a finished planner job, and reconcile the deployment again."""
        if (finished := self.desk.last(key)) is not None:
            self._metrics.plans[finished.result,] += 1
        self.queue.add(key)

    def _look_at(self, keys: set[Key]) -> None:
        for key in keys:
            self._calm.pop(key, None)
            debounce_s = min(_LONGEST_SETTLE_S, _SHARE * self._took.get(key, 0.0))
            self.queue.add_after(key, max(self._settle_s, debounce_s))

    async def _reconcile(self, key: Key, executor: Executor) -> None:
        began = self._clock()
        cached = self.store.seen(key)
        if cached is None:
            self.queue.forget(key)
            self.desk.forget(key)
            self._fleets.forget(key)
            self.watching.forget(key)
            self._faults.pop(key, None)
            self._calm.pop(key, None)
            self._took.pop(key, None)
            self._metrics.reconciled(key.kind, "gone", 0.0)
            return
        if (
            isinstance(cached.resource, InstancePool)
            and _owner(key, cached.resource) in self._moving
        ):
            # Its pods have moved already, while its new replica count is not written yet.
            self.queue.add_after(key, _STALE_S)
            return
        try:
            actions = await self._decide(key, cached)
            await self._carry_out(key, executor, actions)
        except NotLeadingError:
            outcome = "stale"
            self.queue.add_after(key, _STALE_S)
        except StaleError as error:
            outcome = "stale"
            log.info("%s %s/%s has changed meanwhile: %s", *key, error)
            self.queue.add_after(key, _STALE_S)
        except (ApiError, TakenError) as error:
            outcome = "failed"
            delay_s = self.queue.failed(key)
            log.warning("%s %s/%s: %s; again in %.1f s", *key, error, delay_s)
            # The next reconcile writes this to the status before it tries again.
            self._faults[key] = str(error)
        except Exception:
            # A bug that one object triggers must not stop the reconciles of the others.
            outcome = "failed"
            log.exception("%s %s/%s: again in %.1f s", *key, self.queue.failed(key))
        else:
            outcome = self._follow_up(key, cached, actions)
        self._metrics.reconciled(key.kind, outcome, self._clock() - began)

    async def _carry_out(self, key: Key, executor: Executor, actions: list[Action]) -> None:
        if not any(isinstance(action, Repurpose) for action in actions):
            await executor.carry_out(actions)
            return
        self._moving.add(key)
        try:
            await executor.carry_out(actions)
        finally:
            self._moving.discard(key)
            # What the gateways reported of these instances is outdated now.
            self._fleets.forget(key)

    def _follow_up(self, key: Key, cached: Seen, actions: list[Action]) -> str:
        """Submit plan requests and requeue as the actions ask; return the outcome."""
        self.queue.succeeded(key)
        if self._faults.pop(key, None):
            # The status still reports the error.
            self.queue.add(key)
        if (pause_s := self._fleets.again_after_s(key)) is not None:
            self.queue.add_after(key, pause_s)
        for action in actions:
            if isinstance(action, Requeue):
                self.queue.add_after(key, action.after_s)
            elif isinstance(action, Ask) and isinstance(cached.resource, LLMDeployment):
                cluster = self.inventory().cluster
                self.desk.ask(key, cached.resource, cluster, action.question)
        is_idle = all(isinstance(action, Ask | Requeue) for action in actions)
        if is_idle:
            self._calm[key] = self._clock()
        return "idle" if is_idle else "changed"

    async def _decide(self, key: Key, cached: Seen) -> list[Action]:
        match cached.resource:
            case LLMDeployment() as resource:
                return await self._decide_deployment(key, cached, resource)
            case InstancePool() as resource:
                return await self._decide_pool(key, cached, resource)
            case _:
                return invalid.report(
                    key.kind, cached.meta, cached.status, cached.faults, self._now()
                )

    async def _decide_deployment(
        self, key: Key, cached: Seen, resource: LLMDeployment
    ) -> list[Action]:
        pods = self.store.pods(key)
        ready = frozenset(
            pod.name for pod in pods if pod.ready and not (pod.deleting or pod.is_follower)
        )
        reported = await self._fleets.known(key, self.store.gateways(key), ready)
        pods = _loaded(self.store.pods(key), reported or {})
        pools = [each for each in self.store.pools(key) if isinstance(each.resource, InstancePool)]
        view = DeploymentView(
            deployment=resource,
            inventory=self.inventory(),
            now_s=self._now(),
            status=cached.status,
            pools=tuple(each.resource for each in pools if isinstance(each.resource, InstancePool)),
            pool_status={
                each.resource.spec.role: each.status
                for each in pools
                if isinstance(each.resource, InstancePool)
            },
            pods=tuple(self._instances(pools, pods)),
            children=self.store.children(cached.meta["uid"]),
            outcome=self.desk.last(key),
            instances=reported,
            asked=self.desk.asked(key),
            traffic=self.watching.counting.lately(key),
            windows=self.watching.counting.windows(key),
            course=self.watching.course(key, resource, cached.status),
            demand=self.watching.demand(key, resource),
            fault=self._faults.get(key, ""),
            settings=self.settings,
        )
        return self._timed(key, lambda: reconcile_deployment(view))

    def _instances(
        self, pools: list[Seen], pods: tuple[objects.ObservedPod, ...]
    ) -> list[objects.ObservedPod]:
        """Group pods into instances; each pool says how many pods one instance has."""
        nodes_by_pool = {
            cached.resource.name: cached.resource.spec.nodes
            for cached in pools
            if isinstance(cached.resource, InstancePool)
        }
        names = sorted({pod.pool for pod in pods})
        return [
            instance
            for name in names
            for instance in objects.instances(
                (pod for pod in pods if pod.pool == name), nodes_by_pool.get(name, 1)
            )
        ]

    async def _decide_pool(self, key: Key, cached: Seen, resource: InstancePool) -> list[Action]:
        owner = _owner(key, resource)
        reported = self._fleets.last(owner) or {}
        actions = self._decide_with(key, cached, resource, reported)
        if any(isinstance(action, Delete) and action.grace_s is None for action in actions):
            # Scale-down picks the least loaded instances, so get their present load first.
            reported = await self._fleets.fresh(owner, self.store.gateways(owner)) or {}
            actions = self._decide_with(key, cached, resource, reported)
        return actions

    def _decide_with(
        self, key: Key, cached: Seen, resource: InstancePool, reported: Mapping[str, Instance]
    ) -> list[Action]:
        view = self._pool_view(key, cached, resource, reported)
        return self._timed(key, lambda: reconcile_pool(view))

    def _timed(self, key: Key, decide: Callable[[], list[Action]]) -> list[Action]:
        """Run a decision and record how long it took."""
        began = self._clock()
        actions = decide()
        self._took[key] = self._clock() - began
        return actions

    def _pool_view(
        self,
        key: Key,
        cached: Seen,
        resource: InstancePool,
        reported: Mapping[str, Instance],
    ) -> PoolView:
        pods = _loaded(self.store.pods(key), reported)
        statuses = [reported[pod.name] for pod in pods if pod.name in reported]
        return PoolView(
            pool=resource,
            now_s=self._now(),
            status=cached.status,
            pods=pods,
            taken=frozenset(pod.name for pod in self.store.pods(_owner(key, resource))),
            children=self.store.children(cached.meta["uid"]),
            nodes=self.store.nodes,
            numbers=self.inventory().numbers,
            serving=sum(each.selectable for each in statuses) if statuses else None,
            fault=self._faults.get(key, ""),
            settings=self.settings,
        )


def _owner(key: Key, resource: InstancePool) -> Key:
    """Key of the deployment that a pool belongs to."""
    return Key(DEPLOYMENTS, key.namespace, resource.spec.deployment)


def _loaded(
    pods: tuple[objects.ObservedPod, ...], reported: Mapping[str, Instance]
) -> tuple[objects.ObservedPod, ...]:
    """The pods with the number of their requests, where gateways have reported it."""
    return tuple(
        replace(pod, load=float(instance_status.count_requests(reported[pod.name])))
        if pod.name in reported
        else pod
        for pod in pods
    )
