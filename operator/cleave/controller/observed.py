"""What was seen in the cluster, as values: made from manifests, read by every decision.

Pure. Decisions never read manifests themselves, so that tests state a few fields instead of whole
objects, and ten thousand pods take little memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cleave.api.role import Role
from cleave.pods.labels import (
    CELL,
    COMPONENT,
    DEPLOYMENT,
    FOLLOWER,
    INSTANCE,
    POOL,
    REVISION,
    ROLE,
    Manifest,
)
from cleave.pods.resources import GPU, GPU_PRODUCT
from cleave.pods.spread import CLIQUE, INFINIBAND

TEMPLATE = "cleave.dev/template"
"""Annotation of worker pods: digest of what they were made from."""
APPLIED = "cleave.dev/applied"
"""Annotation of everything else that is made: digest of what was applied."""

_RDMA_LABEL = "feature.node.kubernetes.io/rdma.capable"
"""Written by node feature discovery."""
_RDMA_DEVICE = "rdma/"
_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One worker pod: one instance."""

    name: str
    uid: str
    role: Role
    revision: str
    """Which instances it may work with."""
    ready: bool
    phase: str = "Running"
    """Kubernetes' word: Pending, Running, Succeeded, Failed, Unknown."""
    scheduled: bool = True
    """Whether it has a node."""
    unschedulable_reason: str = ""
    """The scheduler's message while it finds no node."""
    deleting: bool = False
    created_s: float = 0.0
    """Seconds since the epoch, as all times here."""
    ready_s: float | None = None
    """Since when it has been ready, or not; None: not known."""
    node: str = ""
    ip: str = ""
    """Where its agent is; empty: not known yet."""
    load: float | None = None
    """Requests that run or wait there; None: nobody has told."""
    namespace: str = "default"
    deployment: str = ""
    pool: str = ""
    template: str = ""
    """Digest of what it was made from; empty: not known."""
    deleted_s: float | None = None
    """When it has to be gone: its deletion was asked for one grace before."""
    restarts: int = 0
    cell: int | None = None
    """Which cell it belongs to, in a pool whose instances share nodes with others."""
    instance: str = ""
    """Name of the instance that it is, or is a part of; empty: its own."""
    is_follower: bool = False
    """Whether it is a further pod of an instance that is spread over nodes."""
    set_name: str = ""
    """Name of the LeaderWorkerSet that made it; empty: none did."""

    @property
    def is_over(self) -> bool:
        """Whether its processes have ended for good: it can only be replaced."""
        return self.phase in ("Failed", "Succeeded")


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """One node."""

    name: str
    ready: bool
    schedulable: bool
    gpu: str = ""
    """Value of nvidia.com/gpu.product; empty: no GPUs."""
    num_gpus: int = 0
    has_rdma: bool = False
    """Whether its network cards read and write GPU memory (InfiniBand, RoCE)."""
    clique: str = ""
    """Nodes of the same NVLink domain have the same."""


@dataclass(frozen=True, slots=True)
class ObservedChild:
    """A Service, Deployment or disruption budget that was made for a resource."""

    kind: str
    namespace: str
    name: str
    uid: str
    applied: str
    """Digest of what was applied; empty: somebody else made it."""
    deleting: bool = False
    ready: int = 0
    """Ready replicas of a Deployment."""
    is_updated: bool = False
    """Whether all replicas of a Deployment, and no others, are of its latest spec."""


def pod(manifest: Manifest) -> ObservedPod | None:
    """A worker pod; None: its labels are not those of one."""
    meta, spec = manifest["metadata"], manifest.get("spec", {})
    status, labels = manifest.get("status", {}), meta.get("labels", {})
    try:
        role = Role(labels[ROLE])
        deployment, pool = labels[DEPLOYMENT], labels[POOL]
    except (KeyError, ValueError):
        return None
    conditions = _conditions(status)
    unplaced = conditions.get("PodScheduled", {})
    node = spec.get("nodeName", "")
    return ObservedPod(
        name=meta["name"],
        namespace=meta.get("namespace", "default"),
        uid=meta.get("uid", ""),
        role=role,
        revision=labels.get(REVISION, ""),
        deployment=deployment,
        pool=pool,
        template=meta.get("annotations", {}).get(TEMPLATE, ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        phase=status.get("phase", "Pending"),
        scheduled=bool(node),
        unschedulable_reason=(
            unplaced.get("message", "")
            if not node and unplaced.get("reason") == "Unschedulable"
            else ""
        ),
        deleting="deletionTimestamp" in meta,
        deleted_s=seconds(meta.get("deletionTimestamp")),
        created_s=seconds(meta.get("creationTimestamp")) or 0.0,
        ready_s=seconds(conditions.get("Ready", {}).get("lastTransitionTime")),
        node=node,
        ip=status.get("podIP", ""),
        cell=int(labels[CELL]) if labels.get(CELL, "").isdigit() else None,
        instance=labels.get(INSTANCE, ""),
        is_follower=labels.get(COMPONENT) == FOLLOWER,
        set_name=labels.get(_SET_LABEL, ""),
        restarts=sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ())),
    )


def instances(pods: Iterable[ObservedPod], pods_each: int = 1) -> list[ObservedPod]:
    """One per instance, as its leader: ready when all of its pods are, over when one of them is."""
    groups: dict[str, list[ObservedPod]] = {}
    for each in pods:
        groups.setdefault(each.instance or each.name, []).append(each)
    return [_whole(group, pods_each) for group in groups.values()]


def _whole(group: Sequence[ObservedPod], pods_each: int) -> ObservedPod:
    leader = min(group, key=lambda each: (each.is_follower, each.name))
    if len(group) == 1 and pods_each == 1:
        return leader
    return replace(
        leader,
        ready=len(group) >= pods_each and all(each.ready for each in group),
        phase=next((each.phase for each in group if each.is_over), leader.phase),
        scheduled=all(each.scheduled for each in group),
        unschedulable_reason=next(filter(None, (e.unschedulable_reason for e in group)), ""),
        deleting=any(each.deleting for each in group),
        restarts=max(each.restarts for each in group),
    )


def node(manifest: Manifest) -> ObservedNode:
    """A node; GPUs that are not allocatable do not count."""
    meta, status = manifest["metadata"], manifest.get("status", {})
    labels, there = meta.get("labels", {}), status.get("allocatable", {})
    return ObservedNode(
        name=meta["name"],
        ready=_conditions(status).get("Ready", {}).get("status") == "True",
        schedulable=not manifest.get("spec", {}).get("unschedulable", False),
        gpu=labels.get(GPU_PRODUCT, ""),
        num_gpus=int(there.get(GPU, 0)),
        has_rdma=INFINIBAND in labels
        or labels.get(_RDMA_LABEL) == "true"
        or any(name.startswith(_RDMA_DEVICE) for name in there),
        clique=labels.get(CLIQUE, ""),
    )


def child(manifest: Manifest) -> ObservedChild:
    """Anything that was applied for a resource."""
    meta, status = manifest["metadata"], manifest.get("status", {})
    spec = manifest.get("spec") or {}
    return ObservedChild(
        kind=manifest["kind"],
        namespace=meta.get("namespace", "default"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        applied=meta.get("annotations", {}).get(APPLIED, ""),
        deleting="deletionTimestamp" in meta,
        ready=status.get("readyReplicas", 0),
        # As `kubectl rollout status` decides it.
        is_updated=status.get("observedGeneration", 0) >= meta.get("generation", 0)
        # Counts of 0 are left out.
        and spec.get("replicas") == status.get("updatedReplicas", 0) == status.get("replicas", 0),
    )


def seconds(timestamp: str | None) -> float | None:
    """Seconds since the epoch of Kubernetes' `2026-01-02T03:04:05Z`; None of None."""
    if timestamp is None:
        return None
    moment = datetime.fromisoformat(timestamp)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def timestamp(seconds_since_epoch: float) -> str:
    """The same moment as Kubernetes writes it."""
    moment = datetime.fromtimestamp(int(seconds_since_epoch), UTC)
    return moment.isoformat().replace("+00:00", "Z")


def _conditions(status: Manifest) -> Mapping[str, Manifest]:
    return {each["type"]: each for each in status.get("conditions", ())}
