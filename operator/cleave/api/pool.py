"""InstancePool: the instances of one role of a deployment. Created and read by `cleave.manifests`.

There is one pool per role, because the `/scale` subresource carries a single number.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cleave.api.adapters import AdapterList
from cleave.api.base import ApiModel, ValidationRule
from cleave.api.engine import EngineSpec
from cleave.api.model import ModelField
from cleave.api.pods.worker_template import DeletionPolicy, WorkerTemplate
from cleave.api.resource import Conditions, Resource, build_name_rule
from cleave.api.role import MAX_POD_ENGINES, Parallelism, Role

KIND = "InstancePool"
MAX_INSTANCE_NODES = 64
"""Most nodes that one instance may span."""
_CEL_RANKS = "(has(self.parallelism.data) ? self.parallelism.data : 1)"


class ReplicasOwner(StrEnum):
    """Who sets the number of instances of a pool."""

    PLAN = "Plan"
    MANUAL = "Manual"
    AUTOSCALER = "Autoscaler"


class PoolRollout(ApiModel):
    """Instances to keep at the present step of a rollout."""

    new: Annotated[int, Field(ge=0, le=20_000)]
    """Instances to keep of the pool's revision."""
    old: Annotated[int, Field(ge=0, le=20_000)]
    """Instances to keep of other revisions."""
    older: dict[str, Annotated[int, Field(ge=0, le=20_000)]] = Field(default_factory=dict)
    """Instances to keep of each other revision; absent: of any."""


class Colocation(ApiModel):
    """Which instances share a node or NVLink domain (DistServe's Algorithm 2)."""

    per_cell: Annotated[int, Field(ge=1, le=128)]
    """Instances of this pool in one cell, a co-location group: equal pipeline stages of all its
    prefill and decode instances share one domain. If several cells of the plan fit a node, they
    form one cell here."""
    topology_key: Annotated[str, Field(min_length=1, max_length=317)] = "kubernetes.io/hostname"
    """Node label whose value identifies the domain."""
    exclusive: bool = False
    """Whether each cell has a domain of its own."""


class CellMember(ApiModel):
    """Engines of one role in a cell that is one pod."""

    role: Annotated[Role, Field(strict=False)]
    """Role of the engines."""
    replicas: Annotated[int, Field(ge=1, le=MAX_POD_ENGINES)] = 1
    """Number of engines in each pod."""
    parallelism: Parallelism = Parallelism()
    """How one engine is distributed over GPUs."""
    args: list[str] = Field(default_factory=list, max_length=144)
    """Further arguments of these engines, after those of `engine.args`."""


class InstancePoolSpec(ApiModel):
    """Desired state of the pool."""

    deployment: Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    """Name of the LLMDeployment that this pool belongs to."""
    role: Annotated[Role, Field(strict=False)]
    """Role of the instances: prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=0, le=10000)] = 1
    """Desired number of instances."""
    owner: Annotated[ReplicasOwner, Field(strict=False)] = ReplicasOwner.PLAN
    """Who sets `replicas`. Plan: the deployment, which overwrites other values with the plan's.
    Manual (`kubectl scale`) and Autoscaler: the deployment does not change it."""
    rollout: PoolRollout | None = None
    """Instances to keep now, by revision. The deployment writes it, so that all roles are replaced
    in step. Absent: the pool replaces its instances one by one."""
    parallelism: Parallelism = Parallelism()
    """How one instance is distributed over GPUs."""
    nodes: Annotated[int, Field(ge=1, le=MAX_INSTANCE_NODES)] = 1
    """Nodes that one instance spans, with one pod on each."""
    colocation: Colocation | None = None
    """Which instances share a node or NVLink domain; absent: they may be placed anywhere."""
    members: list[CellMember] = Field(default_factory=list, max_length=2)
    """If not empty, an instance is a cell in one pod: these engines, each with an agent and GPUs of
    its own. The pool's role is mixed, as a cell serves both phases; `parallelism` has no effect."""
    gpu: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Kind of GPU; absent: any kind."""
    revision: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]+$")]
    """Hash of engine and model; instances of different revisions never work together."""
    model: ModelField
    """The model to serve: its source as text, or an object."""
    engine: EngineSpec = EngineSpec()
    """The inference engine of every instance."""
    adapters: AdapterList = Field(default_factory=list)
    """LoRA adapters that new instances load. Changes reach running instances through the
    LLMDeployment."""
    template: WorkerTemplate = WorkerTemplate()
    """Overrides for the worker pods."""
    pending_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 120
    """Seconds after which an instance that fits on no node is deleted."""
    deletion_policy: Annotated[DeletionPolicy, Field(strict=False)] = DeletionPolicy.DRAIN
    """What happens to running requests when the pool is deleted. Drain: they are finished first.
    Immediate: they are aborted."""

    rules = (
        ValidationRule(
            cel=f"({_CEL_RANKS} > 1 ? {_CEL_RANKS} : "
            "self.parallelism.tensor * self.parallelism.pipeline) % self.nodes == 0",
            is_valid=lambda s: s.parallelism.num_parts % s.nodes == 0,
            message="must divide the GPUs of an instance (tensor * pipeline), or its data-parallel "
            "ranks (data) if there are several: each rank is on one node",
            field="nodes",
        ),
        ValidationRule(
            cel=f"{_CEL_RANKS} <= {MAX_POD_ENGINES} * self.nodes",
            is_valid=lambda s: s.ranks_per_pod <= MAX_POD_ENGINES,
            message=f"must be at most {MAX_POD_ENGINES} for each of the nodes: a pod has a port "
            "for each of its ranks",
            field="parallelism.data",
        ),
        ValidationRule(
            cel="!has(self.parallelism.data) || self.parallelism.data == 1 || "
            "(!has(self.colocation) && (!has(self.members) || self.members.size() == 0))",
            is_valid=lambda s: s.parallelism.data == 1 or not (s.colocation or s.members),
            message="above 1 needs neither colocation nor members: a pod with data-parallel ranks "
            "of an instance has no other engines",
            field="parallelism.data",
        ),
        ValidationRule(
            cel="!has(self.members) || "
            "self.members.all(m, !has(m.parallelism) || !has(m.parallelism.data) || "
            "m.parallelism.data == 1)",
            is_valid=lambda s: all(each.parallelism.data == 1 for each in s.members),
            message="cannot be data-parallel: a pod has the ranks of one instance, or a cell",
            field="members",
        ),
        ValidationRule(
            cel="!has(self.members) || self.members.size() == 0 || "
            "(self.role == 'mixed' && self.nodes == 1)",
            is_valid=lambda s: not s.members or (s.role is Role.MIXED and s.nodes == 1),
            message="needs role mixed and nodes 1: a cell in one pod serves both phases",
            field="members",
        ),
        ValidationRule(
            cel="!has(self.members) || self.members.map(m, has(m.replicas) ? m.replicas : 1).sum()"
            f" <= {MAX_POD_ENGINES}",
            is_valid=lambda s: sum(each.replicas for each in s.members) <= MAX_POD_ENGINES,
            message=f"must have at most {MAX_POD_ENGINES} engines together",
            field="members",
        ),
    )

    @property
    def ranks_per_pod(self) -> int:
        """Data-parallel ranks of an instance in each of its pods."""
        return -(-self.parallelism.data // self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        if not self.members:
            return self.parallelism.gpus
        return sum(each.replicas * each.parallelism.gpus for each in self.members)


class CapacityProbeStatus(ApiModel):
    """The last attempt to have more instances than the nodes have room for."""

    fits: Annotated[int, Field(ge=0)]
    """Number of instances that fitted."""
    attempts: Annotated[int, Field(ge=0)]
    """Consecutive failed attempts with these nodes."""
    again_at: Annotated[datetime, Field(strict=False)]
    """Time of the next attempt; it is made earlier when nodes change."""
    nodes: str
    """Hash of what the nodes offered."""
    reason: str
    """Message of the scheduler."""


class InstancePoolStatus(ApiModel):
    """Observed state of the pool."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status describes."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Number of instances that exist."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Number of instances that are ready."""
    serving: Annotated[int, Field(ge=0)] = 0
    """Number of instances that receive requests of this role now."""
    updated: Annotated[int, Field(ge=0)] = 0
    """Number of instances of the present spec."""
    selector: str | None = None
    """Label selector of the pool's pods, for autoscalers."""
    trial: CapacityProbeStatus | None = None
    """Why there are fewer instances than desired; absent: nodes have room for all."""
    conditions: Conditions = Field(default_factory=list)
    """Ready: all instances of the generation in observedGeneration are ready, and none of an
    earlier spec remain. ScalingLimited: the nodes have no room for all instances. Progressing:
    instances are added, replaced or removed. Degraded: instances are missing, or one keeps
    failing."""


class InstancePool(Resource):
    """An InstancePool holds the instances of one role of an LLMDeployment."""

    kind: Literal["InstancePool"] = "InstancePool"
    spec: InstancePoolSpec
    """Desired state of the pool."""
    status: InstancePoolStatus | None = None
    """Observed state of the pool."""

    rules = (build_name_rule(48),)
