"""The operator at work: from what was seen to reconciles, from reconciles to writes.

One worker at a time looks at an object; decisions are `deployment.reconcile` and `pool.reconcile`,
writes are the executor's. Works only while this operator leads; what is seen goes into the index
all the time, so that taking over means no more than starting to work.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller import deployment, faulty, instances, inventory, observed, pool
from cleave.controller.actions import Action, Ask, Delete, Reference, Repurpose, Requeue
from cleave.controller.deployment import DeploymentView
from cleave.controller.executor import Executor, NotLeadingError, StaleError, TakenError
from cleave.controller.fleets import Fleets
from cleave.controller.instances import Instance
from cleave.controller.inventory import Inventory
from cleave.controller.kube import ApiError
from cleave.controller.loop.watching import Watching
from cleave.controller.metrics import Metrics
from cleave.controller.planning import Desk
from cleave.controller.pool import PoolView
from cleave.controller.queue import WorkQueue
from cleave.controller.settings import Settings
from cleave.controller.store import DEPLOYMENTS, Key, Seen, Store
from cleave.pods.labels import Manifest

log = logging.getLogger(__name__)

WORKERS = 16
RESYNC_S = 60.0
CALM_S = 600.0
"""How long an object is left alone of which nothing was heard and for which nothing was to do."""
SETTLE_S = 0.05
"""Changes come in flocks: a pod that starts tells five of them."""
_SHARE = 4.0
_LONGEST_SETTLE_S = 2.0
"""Large pools take long to look at; so they wait for more changes at a time."""
_STALE_S = 0.2


class Controller:
    """Looks after every LLMDeployment and InstancePool that it sees."""

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
        """Read anew for each decision."""
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
        """Deployments whose instances are changing pools at this moment."""
        self._inventory: tuple[object, Inventory] | None = None

    def seen(self, manifest: Manifest) -> None:
        """An object is there, or has changed."""
        self._look_at(self.store.put(manifest))

    def gone(self, manifest: Manifest) -> None:
        """An object has gone."""
        self._look_at(self.store.drop(manifest))

    def written_off(self, target: Reference) -> None:
        """An object has gone, as the answer to a write told."""
        meta = {"name": target.name, "namespace": target.namespace, "uid": target.uid}
        self.gone({"kind": target.kind, "metadata": meta})

    def lost(self, kind: str, listed: Mapping[tuple[str, str], str], version: int) -> int:
        """Forget objects of a kind that a list of this version does not hold; how many."""
        before = self.store.count().get(kind, 0)
        self._look_at(self.store.missing(kind, listed, version))
        return before - self.store.count().get(kind, 0)

    async def work(self, executor: Executor, elected: asyncio.Event) -> None:
        """Reconcile one object after the other, while this operator leads."""
        while True:
            await elected.wait()
            key = await self.queue.take()
            try:
                await self._reconcile(key, executor)
            finally:
                self.queue.done(key)

    async def resync(self, elected: asyncio.Event, period_s: float = RESYNC_S) -> None:
        """Look at everything now and then, and when this operator begins to lead."""
        while True:
            await elected.wait()
            self._look_at(set(self.due()))
            await asyncio.sleep(period_s)

    def due(self) -> Iterator[Key]:
        """What to look at again though nothing was heard of it."""
        now = self._clock()
        for key in self.store.resources():
            if now - self._calm.get(key, -CALM_S) >= CALM_S:
                yield key

    def statuses(self) -> dict[str, Manifest]:
        """Of all deployments, by NAMESPACE/NAME."""
        known = ((key, self.store.seen(key)) for key in self.store.resources())
        return {
            f"{key.namespace}/{key.name}": seen.status
            for key, seen in known
            if seen is not None and key.kind == DEPLOYMENTS
        }

    def inventory(self) -> Inventory:
        """What nodes offer."""
        nodes = tuple(sorted(self.store.nodes.values(), key=lambda node: node.name))
        if self._inventory is None or self._inventory[0] != nodes:
            self._inventory = nodes, inventory.inventory(nodes, self.settings.cluster)
        return self._inventory[1]

    def _planned(self, key: Key) -> None:
        """The planner has answered."""
        if (answer := self.desk.last(key)) is not None:
            self._metrics.plans[answer.result,] += 1
        self.queue.add(key)

    def _look_at(self, keys: set[Key]) -> None:
        for key in keys:
            self._calm.pop(key, None)
            patience_s = min(_LONGEST_SETTLE_S, _SHARE * self._took.get(key, 0.0))
            self.queue.add_after(key, max(self._settle_s, patience_s))

    async def _reconcile(self, key: Key, executor: Executor) -> None:
        began = self._clock()
        seen = self.store.seen(key)
        if seen is None:
            self.queue.forget(key)
            self.desk.forget(key)
            self._fleets.forget(key)
            self.watching.forget(key)
            self._faults.pop(key, None)
            self._calm.pop(key, None)
            self._took.pop(key, None)
            self._metrics.reconciled(key.kind, "gone", 0.0)
            return
        if isinstance(seen.resource, InstancePool) and _owner(key, seen.resource) in self._moving:
            # It would see an instance that has left, and not yet how many it should have.
            self.queue.add_after(key, _STALE_S)
            return
        try:
            actions = await self._decide(key, seen)
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
            # The next look tells people, before it tries again.
            self._faults[key] = str(error)
        except Exception:
            # A bug of ours in one object's state must not keep the others from being looked at.
            outcome = "failed"
            log.exception("%s %s/%s: again in %.1f s", *key, self.queue.failed(key))
        else:
            outcome = self._follow_up(key, seen, actions)
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
            # What gateways have told of these instances is not true any more.
            self._fleets.forget(key)

    def _follow_up(self, key: Key, seen: Seen, actions: list[Action]) -> str:
        """Ask and wait as the reconcile wants; what the reconcile came to, in a word."""
        self.queue.succeeded(key)
        if self._faults.pop(key, None):
            # The status says so still.
            self.queue.add(key)
        if (pause_s := self._fleets.again_after_s(key)) is not None:
            self.queue.add_after(key, pause_s)
        for action in actions:
            if isinstance(action, Requeue):
                self.queue.add_after(key, action.after_s)
            elif isinstance(action, Ask) and isinstance(seen.resource, LLMDeployment):
                cluster = self.inventory().cluster
                self.desk.ask(key, seen.resource, cluster, action.question)
        is_idle = all(isinstance(action, Ask | Requeue) for action in actions)
        if is_idle:
            self._calm[key] = self._clock()
        return "idle" if is_idle else "changed"

    async def _decide(self, key: Key, seen: Seen) -> list[Action]:
        match seen.resource:
            case LLMDeployment() as resource:
                return await self._decide_deployment(key, seen, resource)
            case InstancePool() as resource:
                return await self._decide_pool(key, seen, resource)
            case _:
                return faulty.report(key.kind, seen.meta, seen.status, seen.faults, self._now())

    async def _decide_deployment(
        self, key: Key, seen: Seen, resource: LLMDeployment
    ) -> list[Action]:
        pods = self.store.pods(key)
        ready = frozenset(
            pod.name for pod in pods if pod.ready and not (pod.deleting or pod.is_follower)
        )
        known = await self._fleets.known(key, self.store.gateways(key), ready)
        pods = _loaded(self.store.pods(key), known or {})
        pools = [each for each in self.store.pools(key) if isinstance(each.resource, InstancePool)]
        view = DeploymentView(
            deployment=resource,
            inventory=self.inventory(),
            now_s=self._now(),
            status=seen.status,
            pools=tuple(each.resource for each in pools if isinstance(each.resource, InstancePool)),
            pool_status={
                each.resource.spec.role: each.status
                for each in pools
                if isinstance(each.resource, InstancePool)
            },
            pods=tuple(self._instances(pools, pods)),
            children=self.store.children(seen.meta["uid"]),
            outcome=self.desk.last(key),
            instances=known,
            asked=self.desk.asked(key),
            traffic=self.watching.counting.lately(key),
            windows=self.watching.counting.windows(key),
            course=self.watching.course(key, resource, seen.status),
            demand=self.watching.demand(key, resource),
            fault=self._faults.get(key, ""),
            settings=self.settings,
        )
        return self._timed(key, lambda: deployment.reconcile(view))

    def _instances(
        self, pools: list[Seen], pods: tuple[observed.ObservedPod, ...]
    ) -> list[observed.ObservedPod]:
        """One per instance; pools say how many pods each has."""
        each = {
            seen.resource.name: seen.resource.spec.nodes
            for seen in pools
            if isinstance(seen.resource, InstancePool)
        }
        names = sorted({pod.pool for pod in pods})
        return [
            instance
            for name in names
            for instance in observed.instances(
                (pod for pod in pods if pod.pool == name), each.get(name, 1)
            )
        ]

    async def _decide_pool(self, key: Key, seen: Seen, resource: InstancePool) -> list[Action]:
        owner = _owner(key, resource)
        known = self._fleets.last(owner) or {}
        actions = self._decide_with(key, seen, resource, known)
        if any(isinstance(action, Delete) and action.grace_s is None for action in actions):
            # The emptiest instances go, so it is worth knowing which those are now.
            known = await self._fleets.fresh(owner, self.store.gateways(owner)) or {}
            actions = self._decide_with(key, seen, resource, known)
        return actions

    def _decide_with(
        self, key: Key, seen: Seen, resource: InstancePool, known: Mapping[str, Instance]
    ) -> list[Action]:
        view = self._pool_view(key, seen, resource, known)
        return self._timed(key, lambda: pool.reconcile(view))

    def _timed(self, key: Key, decide: Callable[[], list[Action]]) -> list[Action]:
        """What is decided; how long it took is remembered."""
        began = self._clock()
        actions = decide()
        self._took[key] = self._clock() - began
        return actions

    def _pool_view(
        self,
        key: Key,
        seen: Seen,
        resource: InstancePool,
        known: Mapping[str, Instance],
    ) -> PoolView:
        pods = _loaded(self.store.pods(key), known)
        told = [known[pod.name] for pod in pods if pod.name in known]
        return PoolView(
            pool=resource,
            now_s=self._now(),
            status=seen.status,
            pods=pods,
            taken=frozenset(pod.name for pod in self.store.pods(_owner(key, resource))),
            children=self.store.children(seen.meta["uid"]),
            nodes=self.store.nodes,
            numbers=self.inventory().numbers,
            serving=sum(each.selectable for each in told) if told else None,
            fault=self._faults.get(key, ""),
            settings=self.settings,
        )


def _owner(key: Key, resource: InstancePool) -> Key:
    """The deployment that a pool belongs to."""
    return Key(DEPLOYMENTS, key.namespace, resource.spec.deployment)


def _loaded(
    pods: tuple[observed.ObservedPod, ...], known: Mapping[str, Instance]
) -> tuple[observed.ObservedPod, ...]:
    """The pods with what runs or waits there, as far as gateways have told."""
    return tuple(
        replace(pod, load=float(instances.count_requests(known[pod.name])))
        if pod.name in known
        else pod
        for pod in pods
    )
