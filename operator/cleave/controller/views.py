"""Inputs of the reconciles of an LLMDeployment and of an InstancePool.

The controller builds a view from its caches for each reconcile; a view does not change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.api.workload import Workload
from cleave.controller.cluster import apply, objects
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.apply import ChildrenByName
from cleave.controller.cluster.gpu_lending import GpuRoom
from cleave.controller.cluster.inventory import Inventory
from cleave.controller.cluster.objects import ObservedChild, ObservedNode, ObservedPod
from cleave.controller.replan.inputs import PlanInputs
from cleave.controller.settings import OperatorSettings
from cleave.manifests.credentials import Accounts, name_accounts
from cleave.manifests.labels import Manifest, get_gateway_name
from cleave.planner.resolved_deployment import ResolvedDeployment
from cleave.rpc.fleet_status import FleetInstance
from cleave.traffic.drift_detector import DriftDetector, TrafficChange
from cleave.traffic.window import TrafficWindow

Pools = Mapping[Role, InstancePool]

MAX_DEFERRAL_S = 60.0
_MAX_DEFERRAL_SHARE = 0.2
"""A due review is deferred for at most `MAX_DEFERRAL_S` seconds and this share of the interval."""


@dataclass(frozen=True, slots=True)
class DriftState:
    """Drift of the traffic from the planned one, up to the last compared window."""

    planned_workload: Workload | None = None
    since_s: float | None = None
    """When the fleet became stable; None: it is not."""
    until_s: float = 0.0
    """End of the last compared window."""
    detector: DriftDetector = DriftDetector()  # noqa: RUF009 - a frozen value
    change: TrafficChange | None = None
    """The last detected change; None: none was detected."""

    def should_defer_review(self, overdue_s: float, interval_s: float) -> bool:
        """Whether a review, due since `overdue_s`, should wait for more evidence of a change."""
        most_s = min(MAX_DEFERRAL_S, _MAX_DEFERRAL_SHARE * interval_s)
        return self.detector.is_suspicious and overdue_s < most_s

    def has_recent_change(self, now_s: float, interval_s: float) -> bool:
        """Whether a change was detected less than an interval ago; each minute adds evidence."""
        return self.change is not None and now_s - self.change.detected_s < interval_s


@dataclass(frozen=True, slots=True)
class TrafficDemand:
    """The traffic of a deployment, as far as scaling needs it."""

    rate: float
    """Requests per second in the last minute."""
    peak: float | None
    """Highest rate of any minute of `Scaling.calm_s`; None: not observed for so long."""
    in_flight: float
    """Requests that wait or run now."""
    idle_s: float
    """Seconds since the last request, as far as this operator has observed."""


@dataclass(frozen=True)
class DeploymentView:
    """An LLMDeployment with everything that its reconcile reads; derived values are cached."""

    resolved: ResolvedDeployment
    """With the API server's metadata; without its status."""
    inventory: Inventory
    now_s: float
    status: Manifest = field(default_factory=dict)
    """As it was last written."""
    pools: tuple[InstancePool, ...] = ()
    pool_status: Mapping[Role, Manifest] = field(default_factory=dict)
    pods: tuple[ObservedPod, ...] = ()
    """One per instance."""
    children: ChildrenByName = field(default_factory=dict)
    plan_result: PlanJob | None = None
    """The planner's last result."""
    instances: Mapping[str, FleetInstance] | None = None
    """The gateways' reports about instances, by pod; None: no gateway has responded."""
    pending_plan: PlanJob | None = None
    """The request that the planner works on."""
    traffic: TrafficWindow | None = None
    """Traffic of about the last minute; None: not known."""
    windows: tuple[TrafficWindow, ...] = ()
    """Recent traffic in windows, oldest first; the last ones make up `traffic`."""
    prometheus_fault: str | None = None
    """What Prometheus did not have of its gateways' counters; empty: nothing; None: it was not
    asked."""
    drift: DriftState = DriftState()
    """Drift of the traffic from the planned one, from the windows compared so far."""
    max_gpus: int | None = None
    """GPUs that the quota of its namespace leaves; None: as many as the nodes."""
    gpu_room: GpuRoom | None = None
    """What deployments of higher priority leave to this one, where it lends them GPUs."""
    demand: TrafficDemand | None = None
    """The rate that instances are scaled by; None: not known, or scaling is off."""
    fault: str = ""
    """Why the writes of the last reconcile failed; empty: they did not."""
    model_fault: str = ""
    """Why the ConfigMap with its model's config.json is not usable; empty: it is, or it has
    none."""
    gateway_fault: str = ""
    """Why the kubelet cannot start a gateway; empty: it can."""
    gateway_wait: str = ""
    """What the start of a gateway waits for; empty: nothing."""
    settings: OperatorSettings = OperatorSettings()  # noqa: RUF009 - a frozen value

    @cached_property
    def pools_by_role(self) -> Pools:
        """Its present pools."""
        return {pool.spec.role: pool for pool in self.pools}

    @property
    def deployment(self) -> LLMDeployment:
        """As its author wrote it."""
        return self.resolved.written

    @cached_property
    def plan_inputs(self) -> PlanInputs:
        """Inputs of its plan."""
        return PlanInputs(self.resolved, self.inventory, self.model_fault)

    @property
    def has_accounts(self) -> bool:
        """Whether the service accounts of its pods exist and are its own."""
        deployment = self.deployment
        uid = deployment.metadata.uid or ""
        accounts = name_accounts(deployment.namespace, deployment.name, uid)
        children = [self.children.get(("ServiceAccount", name)) for name in accounts.names]
        return all(child is not None and not child.deleting for child in children)

    @property
    def gateway(self) -> ObservedChild | None:
        """The gateway's Deployment; None: there is none."""
        return self.children.get(("Deployment", get_gateway_name(self.deployment.name)))

    def list_alive(self, role: Role) -> list[ObservedPod]:
        """The instances of a role that are neither being deleted nor finished."""
        return [pod for pod in self.pods if pod.role is role and pod.is_alive]

    def find_report(self, pod: ObservedPod) -> FleetInstance | None:
        """What gateways report about an instance; None: nothing, or only about an earlier pod of
        its name."""
        reported = (self.instances or {}).get(pod.name)
        is_earlier = reported is not None and self.now_s - reported.report_age_s < pod.created_s
        return None if is_earlier else reported


@dataclass(frozen=True)
class PoolView:
    """An InstancePool with everything that its reconcile reads; derived values are cached."""

    pool: InstancePool
    """With the API server's metadata; without its status."""
    now_s: float
    status: Manifest = field(default_factory=dict)
    """As it was last written."""
    pods: tuple[ObservedPod, ...] = ()
    """All pods, including further pods of instances that span several nodes."""
    used_names: frozenset[str] = frozenset()
    """Names of all instances of the deployment, in any of its pools."""
    children: ChildrenByName = field(default_factory=dict)
    nodes: Mapping[str, ObservedNode] = field(default_factory=dict)
    node_counts_hash: str = ""
    """Hash of the node counts by kind."""
    rdma_device: str = ""
    """RDMA device that all nodes of the pool's kind of GPU offer; empty: there is none."""
    reclaimed: frozenset[str] = frozenset()
    """Names of the instances that deployments of higher priority reclaim."""
    deployment_uid: str = ""
    """Uid of its deployment; empty: there is none."""
    has_account: bool = True
    """Whether the service account of its pods exists and is its deployment's own."""
    is_frozen: bool = False
    """Whether its deployment keeps it as it is: no instance is replaced for its template."""
    serving: int | None = None
    """Instances that gateways send requests to; None: no gateway has responded."""
    fault: str = ""
    """Why the writes of the last reconcile failed; empty: they did not."""
    settings: OperatorSettings = OperatorSettings()  # noqa: RUF009 - a frozen value

    @property
    def accounts(self) -> Accounts:
        """The accounts of its deployment's pods."""
        spec = self.pool.spec
        return name_accounts(self.pool.namespace, spec.deployment, self.deployment_uid)

    @cached_property
    def instances(self) -> list[ObservedPod]:
        """One per instance, including those that are being deleted."""
        return objects.group_instances(self.pods, self.pool.spec.nodes)

    @cached_property
    def template_hash(self) -> str:
        """Hash of the template of the pool's pods."""
        return apply.hash_template(self.pool)

    @cached_property
    def pods_by_instance(self) -> Mapping[str, Sequence[ObservedPod]]:
        """The pods of each instance, by instance name."""
        return objects.index_by_instance(self.pods)


@dataclass(frozen=True, slots=True)
class PoolInstances:
    """The pool's instances, without those that are being deleted or have ended."""

    new: tuple[ObservedPod, ...]
    """Up to date with the pool's spec."""
    old: tuple[ObservedPod, ...]

    @property
    def all(self) -> tuple[ObservedPod, ...]:
        """All of them."""
        return self.new + self.old

    @property
    def num_ready(self) -> int:
        """How many of them are ready."""
        return sum(pod.ready for pod in self.all)
