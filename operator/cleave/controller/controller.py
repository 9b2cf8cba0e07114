"""The controller: from cached objects to reconciles, and from reconciles to writes.

Each object is reconciled by one worker at a time. `deployment.reconcile` and `pool.reconcile`
decide, the executor writes. Workers run only while this operator leads; the cache is always filled.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineSpec, EngineType
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.api.pool import InstancePool
from cleave.controller.author_policy.violations import list_violations
from cleave.controller.cluster import conditions, gateway_client, inventory, objects
from cleave.controller.cluster.actions import (
    Action,
    Delete,
    ObjectReference,
    OrderAdapters,
    PatchStatus,
    Repurpose,
    RequestPlan,
    Requeue,
    SetFinalizers,
)
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.cluster.cache import (
    DEPLOYMENTS,
    POOLS,
    CachedResource,
    ObjectCache,
    ReadConfigMap,
    ResourceKey,
)
from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.executor import Executor, NameTakenError, NotLeadingError, StaleError
from cleave.controller.cluster.gateway_client import GatewayClient, InstancesByPod
from cleave.controller.cluster.inventory import Inventory, PlanMachines
from cleave.controller.cluster.model_hub import RETRY_S, ModelHub
from cleave.controller.cluster.objects import ObservedNode, ObservedPod
from cleave.controller.cluster.prometheus_source import PrometheusSource
from cleave.controller.cluster.reported_model import needs_hub
from cleave.controller.cluster.workqueue import WorkQueue
from cleave.controller.deployment import kv_path
from cleave.controller.deployment.placement import NO_PLAN, PLAN_READY
from cleave.controller.deployment.reconcile import reconcile as reconcile_deployment
from cleave.controller.gpu_reservations import GpuReservations
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.pool.reconcile import reconcile as reconcile_pool
from cleave.controller.replan.planner_process import PlannerClient
from cleave.controller.settings import OperatorSettings
from cleave.controller.traffic_poller import TrafficPoller
from cleave.controller.views import DeploymentView, PoolView
from cleave.manifests.labels import Manifest
from cleave.manifests.scheduling import needs_own_image
from cleave.rpc.fleet_status import FleetInstance

log = logging.getLogger(__name__)

WORKERS = 16
RESYNC_S = 60.0
IDLE_RESYNC_S = 600.0
"""An object without changes and actions is reconciled again after this time."""
DEBOUNCE_S = 0.05
"""Delay before a changed object is reconciled: a starting pod, for example, causes five changes."""
_DEBOUNCE_FACTOR = 4.0
_MAX_DEBOUNCE_S = 2.0
"""Large objects take long to reconcile, so they wait longer and handle more changes at a time:
`_DEBOUNCE_FACTOR` times the last decision, at most this long."""
_STALE_RETRY_S = 0.2
_STARTING_S = 1200.0
"""How long a new pod's agent is read more often."""
WAKE_PERIOD_S = 60.0
"""A deployment that is short of GPUs is reconciled at most once per period because others give some
back: a plan may take a minute of CPU, and scaling elsewhere may take them again soon."""
CONFIG_PERIOD_S = 60.0
"""A ConfigMap with a model's config.json is read again after this time."""

ConfigMapReader = Callable[[str, str], Awaitable[ReadConfigMap]]
"""Reads a ConfigMap by namespace and name."""


class Controller:
    """Reconciles every LLMDeployment and InstancePool in the cache."""

    def __init__(
        self,
        settings: OperatorSettings,
        metrics: OperatorMetrics,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        gateways: GatewayClient[ResourceKey] | None = None,
        debounce_s: float = DEBOUNCE_S,
        read_config_map: ConfigMapReader | None = None,
        model_hub: ModelHub | None = None,
        prometheus: PrometheusSource | None = None,
    ) -> None:
        """`read_config_map`: of a namespace and a name; absent: deployments that refer to one wait.
        It raises KubeApiError. `model_hub`: has config.json of models; absent: it is not read.
        `prometheus`: has the gateways' counters; absent: they are read from gateways."""
        self.settings = settings
        """Called for each decision."""
        self._metrics = metrics
        self._now, self._clock = now, clock
        self._debounce_s = debounce_s
        self.cache = ObjectCache()
        self.queue: WorkQueue[ResourceKey] = WorkQueue(clock)
        self.planner: PlannerClient[ResourceKey] = PlannerClient(
            self._on_plan_finished, lambda key: key.namespace
        )
        self._gateways: GatewayClient[ResourceKey] = gateways or GatewayClient(clock)
        self.traffic_poller = TrafficPoller(self.cache, self.queue.add, now, prometheus)
        self._faults: dict[ResourceKey, str] = {}
        self._idle_since: dict[ResourceKey, float] = {}
        self._decision_s: dict[ResourceKey, float] = {}
        self._woken_at: dict[ResourceKey, float] = {}
        """When a deployment short of GPUs was, or will be, enqueued for what others gave back."""
        self._read_config_map, self._model_hub = read_config_map, model_hub
        self._config_read: dict[ResourceKey, tuple[str, float]] = {}
        self._reconciled: set[ResourceKey] = set()
        """Name of each deployment's ConfigMap, and when it was read last."""
        self._repurposing: set[ResourceKey] = set()
        """Deployments with instances that are changing their role at this moment."""
        self._inventories: tuple[object, dict[tuple[bool, str], Inventory]] = (), {}
        self._reservations = GpuReservations(
            self.cache, settings.device, lambda deployment: self._get_inventory(deployment).topology
        )

    def on_change(self, manifest: Manifest) -> None:
        """Handle a new or changed object."""
        self._enqueue(self.cache.upsert(manifest))

    def on_delete(self, manifest: Manifest) -> None:
        """Handle a deleted object."""
        self._enqueue(self.cache.delete(manifest))

    def on_deleted_by_write(self, target: ObjectReference) -> None:
        """Handle an object that is deleted according to the response to a write."""
        meta = {"name": target.name, "namespace": target.namespace, "uid": target.uid}
        self.on_delete({"kind": target.kind, "metadata": meta})

    def forget_missing(self, kind: str, listed: Mapping[tuple[str, str], str], version: int) -> int:
        """Forget objects of a kind that a list of this version lacks; returns how many."""
        before = self.cache.count().get(kind, 0)
        self._enqueue(self.cache.delete_missing(kind, listed, version))
        return before - self.cache.count().get(kind, 0)

    async def work(self, executor: Executor, elected: asyncio.Event) -> None:
        """Reconcile one object after the other while this operator leads; never returns."""
        while True:
            if not elected.is_set():
                self._reconciled.clear()
            await elected.wait()
            key = await self.queue.take()
            try:
                await self._reconcile(key, executor)
            finally:
                self.queue.mark_done(key)

    async def resync(self, elected: asyncio.Event, period_s: float = RESYNC_S) -> None:
        """Enqueue idle objects periodically, and when this operator begins to lead."""
        while True:
            await elected.wait()
            self._enqueue(set(self.list_due()))
            await asyncio.sleep(period_s)

    def list_due(self) -> Iterator[ResourceKey]:
        """Yield the objects to reconcile again although they have not changed."""
        now = self._clock()
        for key in self.cache.list_resources():
            if now - self._idle_since.get(key, -IDLE_RESYNC_S) >= IDLE_RESYNC_S:
                yield key

    def collect_statuses(self) -> dict[str, Manifest]:
        """Return the status of every deployment, by NAMESPACE/NAME."""
        cached = ((key, self.cache.get(key)) for key in self.cache.list_resources())
        return {
            f"{key.namespace}/{key.name}": entry.status
            for key, entry in cached
            if entry is not None and key.kind == DEPLOYMENTS
        }

    def build_inventory(
        self, engine: EngineSpec | None = None, template: WorkerTemplate | None = None
    ) -> Inventory:
        """Return the inventory of the nodes that `engine` can run on, with the network that pods of
        `template` get; None: of all nodes, with their best network. Built again only when nodes
        have changed, or have been unusable for long."""
        nodes = tuple(sorted(self.cache.nodes.values(), key=lambda node: node.name))
        seen = nodes, inventory.list_lost(nodes, self._now())
        if self._inventories[0] != seen:
            self._inventories = seen, {}
        known, is_limited = self._inventories[1], engine is not None and needs_own_image(engine)
        if engine is not None and engine.type is EngineType.EMULATED:
            template = None  # Its pods request no GPUs, so their nodes are others.
        if (key := (is_limited, repr(template))) not in known:
            known[key] = inventory.build_inventory(
                nodes,
                self.settings.cluster,
                lost=seen[1],
                needs_own_image=is_limited,
                template=template,
            )
        return known[key]

    def find_machines(self, key: ResourceKey, deployment: LLMDeployment) -> PlanMachines:
        """Return the machines that a plan for a deployment may use: without the GPUs that others
        have or have been promised, and within the namespace's quota."""
        whole = self._get_inventory(deployment)
        if deployment.spec.engine.type is EngineType.EMULATED or whole.cluster is None:
            return PlanMachines(whole.cluster, whole.node_counts_hash, whole.unusable)
        free = self._reservations.find_free(key, whole.nodes)
        pools = (each.resource for each in self.cache.list_pools(key))
        seen = kv_path.with_measured_cells(whole.cluster, pools, self._gateways.get_cached(key))
        quota = self._reservations.find_quota(key)
        return inventory.select_free(replace(whole, cluster=seen), free, quota)

    def _list_gpu_nodes(self) -> tuple[ObservedNode, ...]:
        """The nodes on which GPUs are lent."""
        return tuple(node for node in self.cache.nodes.values() if node.num_gpus)

    def _get_inventory(self, deployment: LLMDeployment) -> Inventory:
        return self.build_inventory(deployment.spec.engine, deployment.spec.template)

    def _on_plan_finished(self, key: ResourceKey) -> None:
        """Count a finished planner job, and reconcile the deployment again. Its GPUs are reserved
        until then."""
        if (finished := self.planner.get_result(key)) is not None:
            self._metrics.plans[finished.result,] += 1
            if finished.plan is not None:
                self._reservations.reserve(key, finished.plan)
        self.queue.add(key)

    def _enqueue(self, keys: set[ResourceKey]) -> None:
        for key in keys:
            self._reservations.mark_changed(key)
            self._idle_since.pop(key, None)
            debounce_s = min(_MAX_DEBOUNCE_S, _DEBOUNCE_FACTOR * self._decision_s.get(key, 0.0))
            self.queue.add_after(key, max(self._debounce_s, debounce_s))

    async def _reconcile(self, key: ResourceKey, executor: Executor) -> None:
        began = self._clock()
        cached = self.cache.get(key)
        if cached is None:
            for each in (self.queue, self.planner, self._gateways, self.traffic_poller):
                each.forget(key)
            self._reservations.release(key, self._reservations.get_plan(key))
            self._faults.pop(key, None)
            for times in (self._idle_since, self._decision_s, self._woken_at):
                times.pop(key, None)
            self._config_read.pop(key, None)
            self._reconciled.discard(key)
            self._metrics.record_reconcile(key.kind, "gone", 0.0)
            return
        pool = cached.resource
        if isinstance(pool, InstancePool) and _get_owner_key(key, pool) in self._repurposing:
            # Its pods have moved already, while its new replica count is not written yet.
            self.queue.add_after(key, _STALE_RETRY_S)
            return
        try:
            cached = self._apply_hub(key, await self._refresh_config(key, cached))
            reserved = self._reservations.get_plan(key)
            actions = await self._decide(key, cached)
            await self._carry_out(key, executor, actions)
            self._reservations.release(key, reserved)
        except (NotLeadingError, StaleError) as error:
            outcome = "stale"
            if isinstance(error, StaleError):
                log.info("%s %s/%s has changed meanwhile: %s", *key, error)
            self.queue.add_after(key, _STALE_RETRY_S)
        except (KubeApiError, NameTakenError) as error:
            outcome = "failed"
            delay_s = self.queue.retry_with_backoff(key)
            log.warning("%s %s/%s: %s; again in %.1f s", *key, error, delay_s)
            # The next reconcile writes this to the status before it tries again.
            self._faults[key] = str(error)
        except Exception:
            # A bug that one object triggers must not stop the reconciles of the others.
            outcome = "failed"
            log.exception("%s %s/%s: again in %.1f s", *key, self.queue.retry_with_backoff(key))
        else:
            outcome = self._finish(key, cached, actions)
            self._release_pools(key)
        self._wake_for_gpus(key)
        self._metrics.record_reconcile(key.kind, outcome, self._clock() - began)

    def _release_pools(self, key: ResourceKey) -> None:
        """Let the pools of a deployment go on that has been reconciled for the first time."""
        if key.kind == DEPLOYMENTS and key not in self._reconciled:
            self._reconciled.add(key)
            for pool in self.cache.list_pools(key):
                self.queue.add_after(
                    ResourceKey(POOLS, key.namespace, pool.meta["name"]), self._debounce_s
                )

    def _wake_for_gpus(self, reconciled: ResourceKey) -> None:
        """Enqueue the deployments whose GPUs another one reclaims, and those that what another one
        has given back may suffice for now."""
        try:
            for key in self._reservations.list_lenders(self._list_gpu_nodes()):
                self.queue.add_after(key, self._debounce_s)
            if not self._reservations.take_gain():
                return
            now = self._clock()
            for key in {*self._list_short_of_gpus()} - {reconciled}:
                last = self._woken_at.get(key, -math.inf)
                if last <= now:
                    at = self._woken_at[key] = max(now, last + WAKE_PERIOD_S)
                    self.queue.add_after(key, max(self._debounce_s, at - now))
        except Exception:
            # A bug that the claims of one object trigger must not end the worker.
            log.exception("%s %s/%s: its GPUs are not counted", *reconciled)

    def _list_short_of_gpus(self) -> Iterator[ResourceKey]:
        """Yield the deployments that have no plan, or whose instances find no node."""
        for key in self.cache.list_resources():
            cached = self.cache.get(key)
            if cached is None or not isinstance(cached.resource, LLMDeployment):
                continue
            states = {each.type: each for each in conditions.read(cached.status)}
            plan, limited = states.get(PLAN_READY), states.get("ScalingLimited")
            if (plan and plan.reason in NO_PLAN) or (limited and limited.status):
                yield key

    def _apply_hub(self, key: ResourceKey, cached: CachedResource) -> CachedResource:
        """The deployment with what Hugging Face has about a model that Cleave does not know. While
        that is read the first time, nothing starts; where it cannot be read, what was planned for
        this model stays, and others start as the smallest pair."""
        deployment, hub = cached.resource, self._model_hub
        if hub is None or not isinstance(deployment, LLMDeployment) or not needs_hub(deployment):
            return cached
        if "deletionTimestamp" in cached.meta:
            return cached
        answer = hub.find(deployment.spec.model, lambda: self.queue.add(key))
        if answer is not None and answer.config is not None:
            self.cache.set_hub_config(key, answer.config)
            return self.cache.get(key) or cached
        if answer is None:
            return replace(cached, model_fault=f"its config.json is being read from {hub.url}")
        self.queue.add_after(key, RETRY_S)
        is_planned = "inputs" in (cached.status.get("plan") or {})
        if not is_planned or not self._has_pools_of(key, deployment):
            return cached
        fault = f"its config.json is not read from {hub.url}: {answer.fault}"
        return replace(cached, model_fault=fault)

    def _has_pools_of(self, key: ResourceKey, deployment: LLMDeployment) -> bool:
        """Whether the deployment's pools have its present model."""
        model = deployment.spec.model
        pools = (each.resource for each in self.cache.list_pools(key))
        return any(
            (each.spec.model.source, each.spec.model.revision) == (model.source, model.revision)
            for each in pools
            if isinstance(each, InstancePool)
        )

    async def _refresh_config(self, key: ResourceKey, cached: CachedResource) -> CachedResource:
        """The deployment with the ConfigMap that it takes its model's config.json from, which is
        read again once a period. Raises KubeApiError unless it has been read before."""
        reference = cached.config_reference
        if reference is None or self._read_config_map is None or "deletionTimestamp" in cached.meta:
            return cached
        name, read_s = self._config_read.get(key, ("", 0.0))
        if name != reference.name or self._clock() - read_s >= CONFIG_PERIOD_S:
            try:
                read = await self._read_config_map(key.namespace, reference.name)
            except KubeApiError as error:
                if name != reference.name:
                    raise
                # What was read last holds; scaling and drains go on.
                log.warning("ConfigMap %s/%s: %s", key.namespace, name, error)
            else:
                self.cache.set_config_map(key, read)
            self._config_read[key] = reference.name, self._clock()
        self.queue.add_after(key, CONFIG_PERIOD_S)
        return self.cache.get(key) or cached

    async def _carry_out(self, key: ResourceKey, executor: Executor, actions: list[Action]) -> None:
        if not any(isinstance(action, Repurpose) for action in actions):
            await executor.carry_out(actions)
            if any(isinstance(action, OrderAdapters) for action in actions):
                self._gateways.forget(key)
            return
        self._repurposing.add(key)
        try:
            await executor.carry_out(actions)
        finally:
            self._repurposing.discard(key)
            # The gateways' last reports about these instances are outdated now.
            self._gateways.forget(key)

    def _finish(self, key: ResourceKey, cached: CachedResource, actions: list[Action]) -> str:
        """Submit plan requests and requeue as the actions require; return the outcome."""
        self.queue.reset_backoff(key)
        if self._faults.pop(key, None):
            # The status still reports the error.
            self.queue.add(key)
        if (pause_s := self._gateways.get_retry_delay_s(key)) is not None:
            self.queue.add_after(key, pause_s)
        for action in actions:
            if isinstance(action, Requeue):
                self.queue.add_after(key, action.after_s)
            elif isinstance(action, RequestPlan) and isinstance(cached.resource, LLMDeployment):
                resource = cached.resource
                find_machines = partial(self.find_machines, key, resource)
                self.planner.submit(key, resource, find_machines, action.job)
        is_idle = all(isinstance(action, RequestPlan | Requeue) for action in actions)
        if is_idle:
            self._idle_since[key] = self._clock()
        return "idle" if is_idle else "changed"

    async def _decide(self, key: ResourceKey, cached: CachedResource) -> list[Action]:
        if cached.resource is not None and "deletionTimestamp" not in cached.meta:
            violations = tuple(list_violations(cached.resource, self.settings))
            if violations:
                return _report_invalid(key, replace(cached, faults=violations), self._now())
        match cached.resource:
            case LLMDeployment() as resource:
                return await self._decide_deployment(key, cached, resource)
            case InstancePool() as resource:
                return await self._decide_pool(key, cached, resource)
            case _:
                return _report_invalid(key, cached, self._now())

    async def _decide_deployment(
        self, key: ResourceKey, cached: CachedResource, resource: LLMDeployment
    ) -> list[Action]:
        present = [
            pod
            for pod in self.cache.list_pods(key)
            if not (pod.deleting or pod.is_multi_node_worker)
        ]
        reported = await self._gateways.get_or_refresh(
            key,
            self.cache.list_gateways(key),
            frozenset(pod.name for pod in present if pod.ready),
            self._count_engines(key),
            has_starting=any(_may_report_start(pod, self._now()) for pod in present)
            or _has_pending_adapters(self._gateways.get_cached(key)),
        )
        pods = _with_load(self.cache.list_pods(key), reported or {})
        pools = [
            (each.resource, each.status)
            for each in self.cache.list_pools(key)
            if isinstance(each.resource, InstancePool)
        ]
        machines = self.find_machines(key, resource)
        view = DeploymentView(
            resolved=cached.resolved,
            inventory=replace(self._get_inventory(resource), node_counts_hash=machines.counts_hash),
            now_s=self._now(),
            status=cached.status,
            pools=tuple(pool for pool, _ in pools),
            pool_status={pool.spec.role: status for pool, status in pools},
            pods=tuple(objects.group_by_pool((pool for pool, _ in pools), pods)),
            children=self.cache.get_children(cached.meta["uid"]),
            plan_result=self.planner.get_result(key),
            instances=reported,
            pending_plan=self.planner.get_pending(key),
            traffic=self.traffic_poller.scraper.get_recent(key),
            windows=self.traffic_poller.scraper.get_windows(key),
            prometheus_fault=self.traffic_poller.scraper.get_prometheus_fault(key),
            drift=self.traffic_poller.update_drift(key, resource, cached.status),
            max_gpus=machines.max_gpus,
            gpu_room=self._reservations.find_room(key, self._list_gpu_nodes()),
            demand=self.traffic_poller.measure_demand(key, resource),
            fault=self._faults.get(key, ""),
            model_fault=cached.model_fault,
            gateway_fault=self.cache.find_gateway_fault(key),
            gateway_wait=self.cache.find_gateway_wait(key),
            settings=self.settings,
        )
        return self._time_decision(key, lambda: reconcile_deployment(view))

    async def _decide_pool(
        self, key: ResourceKey, cached: CachedResource, resource: InstancePool
    ) -> list[Action]:
        owner = _get_owner_key(key, resource)
        reported = self._gateways.get_cached(owner) or {}
        actions = self._reconcile_pool(key, cached, resource, reported)
        if any(isinstance(action, Delete) and action.grace_s is None for action in actions):
            # Scale-down picks the least loaded instances, so get their present load first.
            gateways, counts = self.cache.list_gateways(owner), self._count_engines(owner)
            reported = await self._gateways.get_fresh(owner, gateways, counts) or {}
            actions = self._reconcile_pool(key, cached, resource, reported)
        return actions

    def _count_engines(self, deployment: ResourceKey) -> dict[str, int]:
        return objects.count_engines(self.cache.list_pods(deployment))

    def _reconcile_pool(
        self,
        key: ResourceKey,
        cached: CachedResource,
        resource: InstancePool,
        reported: Mapping[str, FleetInstance],
    ) -> list[Action]:
        owner = _get_owner_key(key, resource)
        inventory_now = self.build_inventory(resource.spec.engine, resource.spec.template)
        pods = _with_load(self.cache.list_pods(key), reported)
        statuses = [reported[pod.name] for pod in pods if pod.name in reported]
        view = PoolView(
            pool=resource,
            now_s=self._now(),
            status=cached.status,
            pods=pods,
            used_names=frozenset(pod.name for pod in self.cache.list_pods(owner)),
            children=self.cache.get_children(cached.meta["uid"]),
            nodes=self.cache.nodes,
            node_counts_hash=inventory_now.node_counts_hash,
            rdma_device=inventory_now.topology.get_rdma_device(resource.spec.gpu),
            reclaimed=self._reservations.get_reclaimed(owner, self._list_gpu_nodes()),
            serving=sum(each.selectable for each in statuses) if statuses else None,
            fault=self._faults.get(key, ""),
            deployment_uid=self.cache.get_uid(owner),
            has_account=self.cache.has_account(owner),
            is_frozen=self._is_frozen(owner),
            settings=self.settings,
        )
        return self._time_decision(key, lambda: reconcile_pool(view))

    def _is_frozen(self, deployment: ResourceKey) -> bool:
        """Whether the pools of a deployment keep their instances: it is paused, or this operator,
        which may be of another version, has not looked at it since it leads."""
        cached = self.cache.get(deployment)
        if cached is None:
            return False
        is_paused = isinstance(cached.resource, LLMDeployment) and cached.resource.spec.paused
        return is_paused or deployment not in self._reconciled

    def _time_decision(self, key: ResourceKey, decide: Callable[[], list[Action]]) -> list[Action]:
        """Run a decision and record how long it took."""
        began = self._clock()
        actions = decide()
        self._decision_s[key] = self._clock() - began
        return actions


def _report_invalid(key: ResourceKey, cached: CachedResource, now_s: float) -> list[Action]:
    """Set Ready to False with the faults; status, pods and gateways stay as they are.

    The webhook refuses such a resource; one that a version of Cleave with other rules admitted may
    still exist. A resource that is being deleted loses its finalizer.
    """
    meta, before = cached.meta, cached.status.get("conditions", [])
    target = ObjectReference(*key, meta["uid"])
    finalizers = meta.get("finalizers", [])
    if "deletionTimestamp" in meta:
        remaining = tuple(name for name in finalizers if name != FINALIZER)
        version = meta.get("resourceVersion", "")
        return [SetFinalizers(target, remaining, version)] if FINALIZER in finalizers else []
    ready = ConditionState("Ready", False, "Invalid", "; ".join(cached.faults))
    merged = conditions.merge(before, [ready], meta.get("generation"), now_s)
    if [each for each in before if each["type"] == "Ready"] == merged:
        return []
    others = [each for each in before if each["type"] != "Ready"]
    status = {**cached.status, "conditions": [*merged, *others]}
    return [PatchStatus(target, status), *conditions.build_events(target, before, [ready])]


def _may_report_start(pod: ObservedPod, now_s: float) -> bool:
    """Whether gateways may soon report something new of an instance that is not ready. Without an
    address there is no agent, and what has not started for long will not do so in seconds."""
    is_starting = pod.is_alive and not pod.ready and not pod.start_fault and pod.ip
    return bool(is_starting) and now_s - pod.created_s < _STARTING_S


def _has_pending_adapters(instances: InstancesByPod) -> bool:
    """Whether an instance still loads adapters, or retries to."""
    return any(each.adapters_pending for each in (instances or {}).values())


def _get_owner_key(key: ResourceKey, resource: InstancePool) -> ResourceKey:
    """Key of the deployment that a pool belongs to."""
    return ResourceKey(DEPLOYMENTS, key.namespace, resource.spec.deployment)


def _with_load(
    pods: tuple[ObservedPod, ...], reported: Mapping[str, FleetInstance]
) -> tuple[ObservedPod, ...]:
    """The pods with the number of their requests, where gateways have reported it."""
    return tuple(
        replace(pod, load=float(gateway_client.count_requests(reported[pod.name])))
        if pod.name in reported
        else pod
        for pod in pods
    )
