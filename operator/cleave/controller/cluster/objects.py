"""Cluster objects as values: parsed from manifests, read by every decision. Pure.

Decisions never read manifests themselves, so that tests set a few fields instead of whole objects,
and ten thousand pods take little memory.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cleave.api.pods.quantity import parse_quantity
from cleave.api.pool import InstancePool
from cleave.api.role import MAX_POD_ENGINES, Role
from cleave.controller.cluster.node_sharing import (
    Taint,
    explain_shared,
    explain_uncounted,
    list_taints,
)
from cleave.manifests.labels import (
    CELL,
    COMPONENT,
    DEPLOYMENT,
    GPU,
    INSTANCE,
    NODE_WORKER,
    POOL,
    REVISION,
    ROLE,
    WEIGHTS,
    WEIGHTS_READ_MS,
    Manifest,
    get_agent_port,
    get_agent_port_name,
)
from cleave.manifests.resources import (
    GPU_REQUESTS,
    find_rdma_device,
    has_rdma_devices,
    has_whole_cards_only,
)
from cleave.manifests.scheduling import explain_unusable
from cleave.manifests.topology import CLIQUE, INFINIBAND
from cleave.perf.hardware.gpu import GPU_PRODUCT
from cleave.rpc.credentials import AgentEndpoint

TEMPLATE_ANNOTATION = "cleave.dev/template"
"""Annotation of worker pods: hash of the pool template that they were created from."""
APPLIED_ANNOTATION = "cleave.dev/applied"
"""Annotation of all other created objects: hash of the manifest that was applied."""

_CORDONED = "node.kubernetes.io/unschedulable"
"""Taint of a cordoned node; its time is when the node was cordoned."""
_ACCESS_FIELDS = {
    "NetworkPolicy": ("spec",), "Role": ("rules",), "RoleBinding": ("roleRef", "subjects"),
}  # fmt: skip
"""Fields to which the API server adds no defaults, as the manifests have them all."""
_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"

_STARTING = ("ContainerCreating", "PodInitializing")
"""Reasons for which every container waits at first."""
_BACK_OFF = "CrashLoopBackOff"
"""Between two starts of a container that ends; how it ended says more."""
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff")
"""These alternate; the second repeats the first one's message after a prefix."""
_MAX_FAULT_LENGTH = 400
OUT_OF_MEMORY = "OOMKilled"
"""Kubernetes' reason for the end of a container that exceeded its memory limit."""
_RESTARTS_TO_REPORT = 3


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A worker pod. Merged by `group_instances`, it represents a whole instance."""

    name: str
    uid: str
    role: Role
    revision: str
    """Instances work together with those of the same revision only. That of the spec; after a dot
    the weights, where others were found later (`controller.deployment.weights`)."""
    ready: bool
    phase: str = "Running"
    """The phase of Kubernetes: Pending, Running, Succeeded, Failed or Unknown."""
    scheduled: bool = True
    """Whether a node is assigned."""
    unschedulable_reason: str = ""
    """The scheduler's message while it finds no node."""
    deleting: bool = False
    created_s: float = 0.0
    """In seconds since the epoch, as all times here."""
    ready_s: float | None = None
    """When its Ready condition last changed; None: not known."""
    node: str = ""
    ip: str = ""
    """Address of its agent; empty: not assigned yet."""
    load: float | None = None
    """Running and waiting requests; None: no gateway has reported it."""
    namespace: str = "default"
    deployment: str = ""
    pool: str = ""
    template: str = ""
    """Hash of the pool template that it was created from; empty: not known."""
    deleted_s: float | None = None
    """When its grace period ends: deletion was requested one grace period before."""
    restarts: int = 0
    last_end: str = ""
    """How its container ended last, for example "OOMKilled"; empty: it has not."""
    start_fault: str = ""
    """Why the kubelet cannot start its container; empty: it can."""
    cell: int | None = None
    """Number of its cell, in a pool whose instances share nodes with others."""
    num_engines: int = 1
    """Engines in this pod that have an agent."""
    further_agents: tuple[AgentEndpoint, ...] = ()
    """Of an instance: agents in its other pods."""
    num_gpus: int = 0
    """GPUs that it requests."""
    instance: str = ""
    """Name of its instance; empty: the pod's own name."""
    is_multi_node_worker: bool = False
    """Whether it is a further pod of an instance that spans several nodes."""
    weights: str = ""
    """Digest of what its engine had loaded when that was seen last; empty: it was not seen."""
    weights_read_ms: int = 0
    """When that was read, by its node's clock, in ms."""
    set_name: str = ""
    """Name of the LeaderWorkerSet that created it; empty: none did."""

    @property
    def spec_revision(self) -> str:
        """The revision of the spec that it was created from."""
        return self.revision.partition(".")[0]

    @property
    def is_over(self) -> bool:
        """Whether its processes have ended and will not restart, so that it has to be replaced."""
        return self.phase in ("Failed", "Succeeded")

    @property
    def is_alive(self) -> bool:
        """Whether it is neither being deleted nor over."""
        return not (self.deleting or self.is_over)

    @property
    def keeps_ending(self) -> bool:
        """Whether it ends again and again; one without enough memory will, after the first time."""
        least = 1 if self.last_end == OUT_OF_MEMORY else _RESTARTS_TO_REPORT
        return not self.ready and self.restarts >= least

    @property
    def is_failing(self) -> bool:
        """Whether it will not become ready as it is: no node, no start, or one end after another.

        An instance that is loading, or not ready for a moment, is none of these.
        """
        return not self.ready and (
            not self.scheduled or bool(self.start_fault) or self.keeps_ending
        )

    @property
    def wait(self) -> str:
        """What its start waits for, or why it fails; empty: it has started."""
        if self.start_fault:
            return f"{self.name}: {self.start_fault}"
        is_pending = self.phase == "Pending" and self.scheduled
        return describe_wait(self.name, self.unschedulable_reason, is_pending)

    @property
    def agents(self) -> tuple[AgentEndpoint, ...]:
        """Its agents; empty without an address."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        addresses = (f"{host}:{get_agent_port(number)}" for number in range(self.num_engines))
        own = (AgentEndpoint(each, self.name, self.uid) for each in addresses)
        return (*own, *self.further_agents) if host else ()

    @property
    def instance_name(self) -> str:
        """Name of the instance that it is a pod of."""
        return self.instance or self.name


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node."""

    name: str
    ready: bool
    schedulable: bool
    gpu: str = ""
    """Value of its label nvidia.com/gpu.product; empty: no GPUs."""
    num_gpus: int = 0
    rdma_device: str = ""
    """Resource that gives a pod a network card for RDMA (InfiniBand, RoCE); empty: there is none,
    or fewer of them than GPUs. It is empty for a while when its plug-in restarts."""
    offers_rdma: bool = False
    """Whether it has such a resource, also while none is allocatable: plans depend on it."""
    has_whole_cards_only: bool = False
    """Whether all of these are whole cards, which pods get together with their network only."""
    infiniband_domain: str = ""
    """Value of its label cleave.dev/infiniband-domain."""
    clique: str = ""
    """Equal for nodes of the same NVLink domain."""
    fault: str = ""
    """Why Cleave's own image for GPUs cannot run there; empty: it can."""
    shared: str = ""
    """Why its GPUs are not whole ones, or it offers none although it has some; empty: they are."""
    labels: frozenset[tuple[str, str]] = frozenset()
    taints: tuple[Taint, ...] = ()
    """Those that keep pods away, without Kubernetes' own about the node's health."""
    unusable_since_s: float | None = None
    """Since when it has not been ready or takes no pods; None: it does, or that is not noted."""

    def has_rdma(self, *, needs_whole_cards: bool) -> bool:
        """Whether pods reach GPU memory on other nodes by RDMA: the node has devices for it that
        they request, or the cluster's administrators say so."""
        is_requested = needs_whole_cards or not self.has_whole_cards_only
        return (self.offers_rdma and is_requested) or bool(self.infiniband_domain)


@dataclass(frozen=True, slots=True)
class ObservedChild:
    """An object that was applied for a resource, such as a Service or Deployment."""

    kind: str
    namespace: str
    name: str
    uid: str
    applied: str
    """Hash of the applied manifest; empty: something else created it."""
    access: str = ""
    """As `get_access_rules` returns it."""
    deleting: bool = False
    replicas: int = 0
    """Pods of a Deployment."""
    ready: int = 0
    """Those of them that are ready."""
    fault: str = ""
    """Why a Deployment's pods cannot be created, such as a quota; empty: they can."""
    is_updated: bool = False
    """Whether a Deployment has replicas of its latest spec only, and all of them."""


def parse_pod(manifest: Manifest) -> ObservedPod | None:
    """Parse a worker pod; None: its labels are not those of one."""
    meta, spec = manifest["metadata"], manifest.get("spec", {})
    status, labels = manifest.get("status", {}), meta.get("labels", {})
    try:
        role = Role(labels[ROLE])
        deployment, pool = labels[DEPLOYMENT], labels[POOL]
    except (KeyError, ValueError):
        return None
    # Further pods of an engine that spans nodes have no agent, those of data-parallel ranks do.
    least_engines = 0 if labels.get(COMPONENT) == NODE_WORKER else 1
    conditions = _index_by_type(status)
    node = spec.get("nodeName", "")
    return ObservedPod(
        name=meta["name"],
        namespace=meta.get("namespace", "default"),
        uid=meta.get("uid", ""),
        role=role,
        revision=labels.get(REVISION, ""),
        deployment=deployment,
        pool=pool,
        template=meta.get("annotations", {}).get(TEMPLATE_ANNOTATION, ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        phase=status.get("phase", "Pending"),
        scheduled=bool(node),
        unschedulable_reason="" if node else find_unschedulable_reason(status),
        deleting="deletionTimestamp" in meta,
        deleted_s=parse_timestamp(meta.get("deletionTimestamp")),
        created_s=parse_timestamp(meta.get("creationTimestamp")) or 0.0,
        ready_s=parse_timestamp(conditions.get("Ready", {}).get("lastTransitionTime")),
        node=node,
        ip=status.get("podIP", ""),
        cell=int(labels[CELL]) if labels.get(CELL, "").isdigit() else None,
        instance=labels.get(INSTANCE, ""),
        is_multi_node_worker=labels.get(INSTANCE, meta["name"]) != meta["name"],
        weights=labels.get(WEIGHTS, ""),
        weights_read_ms=_parse_ms(meta.get("annotations", {}).get(WEIGHTS_READ_MS, "")),
        set_name=labels.get(_SET_LABEL, ""),
        restarts=sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ())),
        last_end=_find_last_end(status),
        start_fault=find_start_fault(status),
        num_engines=max(least_engines, _count_agents(spec)),
        num_gpus=_count_gpus(spec),
    )


def find_unschedulable_reason(status: Manifest) -> str:
    """The scheduler's message about a pod with this status and without a node; empty: none yet."""
    unplaced = _index_by_type(status).get("PodScheduled", {})
    return unplaced.get("message", "") if unplaced.get("reason") == "Unschedulable" else ""


def describe_wait(name: str, unschedulable_reason: str, is_pending: bool) -> str:
    """What the start of a pod waits for; empty: nothing. `is_pending`: it has a node, and its
    container has not started; of a Secret that does not exist only the pod's Events say so."""
    if unschedulable_reason:
        return f"{name} has no node: {unschedulable_reason}"
    if is_pending:
        return f"{name} is being created; if that lasts, kubectl describe pod {name} says why"
    return ""


def find_start_fault(status: Manifest) -> str:
    """Why the kubelet cannot start a container of a pod with this status; empty: it can."""
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason", "")
        if not reason or reason in (*_STARTING, _BACK_OFF):
            continue
        message = waiting.get("message", "").strip()
        if reason in _IMAGE_REASONS:
            reason, image = _IMAGE_REASONS[0], container.get("image", "")
            message = message.rpartition(f"{reason}: ")[2] or image
        return f"{reason}: {message}"[:_MAX_FAULT_LENGTH] if message else reason
    return ""


def _find_last_end(status: Manifest) -> str:
    """How the container that was restarted most often ended last."""
    containers: Sequence[Manifest] = status.get("containerStatuses", ())
    restarted: Manifest = max(containers, key=lambda each: each.get("restartCount", 0), default={})
    end = restarted.get("lastState", {}).get("terminated", {})
    if not end:
        return ""
    out_of_memory = end.get("reason") == OUT_OF_MEMORY
    return OUT_OF_MEMORY if out_of_memory else f"exit code {end.get('exitCode', 0)}"


def _parse_ms(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() else 0


def _count_agents(pod_spec: Manifest) -> int:
    containers = pod_spec.get("containers", ())
    ports = {port.get("name") for each in containers for port in each.get("ports", ())}
    return sum(get_agent_port_name(number) in ports for number in range(MAX_POD_ENGINES))


def _count_gpus(pod_spec: Manifest) -> int:
    limits = (
        each.get("resources", {}).get("limits", {}) for each in pod_spec.get("containers", ())
    )
    return sum(int(parse_quantity(each.get(GPU, 0))) for each in limits)


def group_instances(pods: Iterable[ObservedPod], pods_each: int = 1) -> list[ObservedPod]:
    """Merge pods into instances: ready when all pods are, over when one is."""
    return [_merge_pods(group, pods_each) for group in index_by_instance(pods).values()]


def group_by_pool(
    pools: Iterable[InstancePool], pods: Iterable[ObservedPod]
) -> Iterator[ObservedPod]:
    """Group pods into instances; each pool sets the number of pods per instance."""
    num_nodes = {pool.name: pool.spec.nodes for pool in pools}
    by_pool: dict[str, list[ObservedPod]] = defaultdict(list)
    for pod in pods:
        by_pool[pod.pool].append(pod)
    for name, same in sorted(by_pool.items()):
        yield from group_instances(same, num_nodes.get(name, 1))


def count_engines(pods: Iterable[ObservedPod]) -> dict[str, int]:
    """Return the number of engines with an agent of each instance, by instance name."""
    counts: Counter[str] = Counter()
    for pod in pods:
        counts[pod.instance_name] += pod.num_engines
    return counts


def index_by_instance(pods: Iterable[ObservedPod]) -> dict[str, list[ObservedPod]]:
    """Return the pods of each instance, by instance name."""
    groups: dict[str, list[ObservedPod]] = {}
    for each in pods:
        groups.setdefault(each.instance_name, []).append(each)
    return groups


def _merge_pods(group: Sequence[ObservedPod], pods_each: int) -> ObservedPod:
    leader = min(group, key=lambda each: (each.is_multi_node_worker, each.name))
    if len(group) == 1 and pods_each == 1:
        return leader
    return replace(
        leader,
        ready=len(group) >= pods_each and all(each.ready for each in group),
        phase=next((each.phase for each in group if each.is_over), leader.phase),
        scheduled=all(each.scheduled for each in group),
        unschedulable_reason=next(filter(None, (e.unschedulable_reason for e in group)), ""),
        deleting=any(each.deleting for each in group),
        further_agents=tuple(
            agent for each in group if each is not leader for agent in each.agents
        ),
        restarts=max(each.restarts for each in group),
        last_end=max(group, key=lambda each: each.restarts).last_end,
        start_fault=next(filter(None, (each.start_fault for each in group)), ""),
    )


def parse_node(manifest: Manifest) -> ObservedNode:
    """Parse a node; only allocatable GPUs count."""
    meta, status = manifest["metadata"], manifest.get("status", {})
    labels, allocatable = meta.get("labels", {}), status.get("allocatable", {})
    num_gpus = int(parse_quantity(allocatable.get(GPU, 0)))
    shared = (
        explain_shared(labels, num_gpus) if num_gpus else explain_uncounted(labels, allocatable)
    )
    return ObservedNode(
        name=meta["name"],
        ready=_index_by_type(status).get("Ready", {}).get("status") == "True",
        schedulable=not manifest.get("spec", {}).get("unschedulable", False),
        gpu=labels.get(GPU_PRODUCT, ""),
        num_gpus=num_gpus,
        rdma_device=find_rdma_device(allocatable, num_gpus),
        offers_rdma=has_rdma_devices(status, num_gpus),
        has_whole_cards_only=has_whole_cards_only(status),
        infiniband_domain=labels.get(INFINIBAND, ""),
        clique=labels.get(CLIQUE, ""),
        fault=explain_unusable(labels),
        shared=shared,
        labels=frozenset(labels.items()),
        taints=list_taints(manifest),
        unusable_since_s=_find_unusable_since_s(manifest),
    )


def find_gpu_quota(manifest: Manifest) -> int | None:
    """GPUs that a ResourceQuota grants all pods of its namespace; None: it does not count GPUs, or
    only those of some pods (scopes)."""
    spec = manifest.get("spec", {})
    amount = spec.get("hard", {}).get(GPU_REQUESTS)
    if amount is None or spec.get("scopes") or spec.get("scopeSelector"):
        return None
    return int(parse_quantity(amount))


def _find_unusable_since_s(manifest: Manifest) -> float | None:
    ready = _index_by_type(manifest.get("status", {})).get("Ready", {})
    times = [] if ready.get("status") == "True" else [ready.get("lastTransitionTime")]
    taints = manifest.get("spec", {}).get("taints") or ()
    times += [each.get("timeAdded") for each in taints if each.get("key") == _CORDONED]
    return min(filter(None, map(parse_timestamp, times)), default=None)


def get_access_rules(manifest: Manifest) -> str:
    """What a NetworkPolicy, Role or RoleBinding permits, as text; empty for other kinds. Compared
    as a whole: an edit by hand that opened something would otherwise stay."""
    fields = _ACCESS_FIELDS.get(manifest["kind"], ())
    return json.dumps([manifest.get(name) for name in fields], sort_keys=True) if fields else ""


def parse_child(manifest: Manifest) -> ObservedChild:
    """Parse an object that was applied for a resource."""
    meta, status = manifest["metadata"], manifest.get("status", {})
    spec = manifest.get("spec") or {}
    return ObservedChild(
        kind=manifest["kind"],
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        applied=meta.get("annotations", {}).get(APPLIED_ANNOTATION, ""),
        access=get_access_rules(manifest),
        deleting="deletionTimestamp" in meta,
        replicas=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        fault=_find_replica_failure(status),
        # The rule of `kubectl rollout status`.
        is_updated=status.get("observedGeneration", 0) >= meta.get("generation", 0)
        # Kubernetes omits counts of 0.
        and spec.get("replicas") == status.get("updatedReplicas", 0) == status.get("replicas", 0),
    )


def _find_replica_failure(status: Manifest) -> str:
    failure = _index_by_type(status).get("ReplicaFailure", {})
    return failure.get("message", "")[:_MAX_FAULT_LENGTH] if failure.get("status") == "True" else ""


def parse_timestamp(timestamp: str | None) -> float | None:
    """Convert Kubernetes' `2026-01-02T03:04:05Z` to seconds since the epoch; None stays None."""
    if timestamp is None:
        return None
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def format_timestamp(seconds_since_epoch: float) -> str:
    """Format seconds since the epoch as Kubernetes does."""
    moment = datetime.fromtimestamp(int(seconds_since_epoch), UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _index_by_type(status: Manifest) -> Mapping[str, Manifest]:
    return {each["type"]: each for each in status.get("conditions", ())}
