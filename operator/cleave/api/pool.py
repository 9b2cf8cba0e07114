"""InstancePool: the instances of one role of a deployment. Made by `cleave.pods`, read by it too.

One pool per role, because `/scale` carries a single number.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cleave.api.engine import DeletionPolicy, Engine, Template
from cleave.api.model import ModelField
from cleave.api.resource import Conditions, Resource, name_rule
from cleave.api.role import Parallelism, Role
from cleave.api.shape import Rule, Shape

KIND = "InstancePool"


class ReplicasOwner(StrEnum):
    """Who decides how many instances a pool has."""

    PLAN = "Plan"
    MANUAL = "Manual"
    AUTOSCALER = "Autoscaler"


class PoolRollout(Shape):
    """Instances to keep at this moment of a roll-out."""

    new: Annotated[int, Field(ge=0, le=20_000)]
    """Of the pool's revision."""
    old: Annotated[int, Field(ge=0, le=20_000)]
    """Of other revisions."""
    older: dict[str, Annotated[int, Field(ge=0, le=20_000)]] = Field(default_factory=dict)
    """The same by revision; absent: whichever."""


class Colocation(Shape):
    """Which instances share a node or NVLink domain (DistServe's Algorithm 2)."""

    per_cell: Annotated[int, Field(ge=1, le=128)]
    """Instances of this pool in one cell. Equal pipeline stages of all prefill and decode instances
    of a cell lie in one domain; as many cells of the plan as fit a node are one here."""
    topology_key: Annotated[str, Field(min_length=1, max_length=317)] = "kubernetes.io/hostname"
    """Label of nodes whose value names the domain."""
    exclusive: bool = False
    """Whether no two cells may share a domain: each fills one."""


class InstancePoolSpec(Shape):
    """What is wanted."""

    deployment: Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    """The LLMDeployment that this pool belongs to."""
    role: Annotated[Role, Field(strict=False)]
    """What its instances serve."""
    replicas: Annotated[int, Field(ge=0, le=10000)] = 1
    """Instances."""
    owner: Annotated[ReplicasOwner, Field(strict=False)] = ReplicasOwner.PLAN
    """Who owns `replicas`. Plan: the deployment, whose plan overwrites what else is set. Manual
    (`kubectl scale`) and Autoscaler: the deployment leaves it alone."""
    rollout: PoolRollout | None = None
    """Instances to keep now, by revision; the deployment writes it, so that roles move together.
    Absent: the pool replaces its instances one by one."""
    parallelism: Parallelism = Parallelism()
    """How one instance is spread over GPUs."""
    nodes: Annotated[int, Field(ge=1, le=64)] = 1
    """Nodes that one instance is spread over, with a pod on each."""
    colocation: Colocation | None = None
    """Which instances share a node or NVLink domain; absent: they may be anywhere."""
    gpu: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Kind of GPU; absent: whatever the nodes have."""
    revision: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]+$")]
    """Identifies engine and model; instances of unlike revisions never work together."""
    model: ModelField
    """The model: its source as text, or an object."""
    engine: Engine = Engine()
    """The engine of every instance."""
    template: Template = Template()
    """Overrides for worker pods."""
    pending_timeout_s: Annotated[int, Field(ge=10, le=86_400)] = 120
    """Seconds after which an instance that no node has room for is given up."""
    deletion_policy: Annotated[DeletionPolicy, Field(strict=False)] = DeletionPolicy.DRAIN
    """Drain: running requests end first when the pool is deleted. Immediate: they are cut."""

    rules = (
        Rule(
            cel="(self.parallelism.tensor * self.parallelism.pipeline) % self.nodes == 0",
            holds=lambda s: s.parallelism.gpus % s.nodes == 0,
            message="must divide the GPUs of an instance (tensor * pipeline)",
            field="nodes",
        ),
    )


class Trial(Shape):
    """The last trial to have more instances than nodes have room for."""

    fits: Annotated[int, Field(ge=0)]
    """Instances that there was room for."""
    attempts: Annotated[int, Field(ge=0)]
    """How often in a row it failed, with these nodes."""
    again_at: Annotated[datetime, Field(strict=False)]
    """When the next one begins, unless nodes change before."""
    nodes: str
    """Digest of what nodes offered."""
    reason: str
    """What the scheduler said."""


class InstancePoolStatus(Shape):
    """What is."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status speaks of."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Instances that exist."""
    ready: Annotated[int, Field(ge=0)] = 0
    """Instances that are ready."""
    serving: Annotated[int, Field(ge=0)] = 0
    """Instances that take requests of this role now."""
    updated: Annotated[int, Field(ge=0)] = 0
    """Instances that are as the spec wants them."""
    selector: str | None = None
    """Label selector of its pods, for autoscalers."""
    trial: Trial | None = None
    """Why there are fewer instances than wanted; absent: nodes have room for all."""
    conditions: Conditions = Field(default_factory=list)
    """Ready: all instances are ready, as the generation in observedGeneration asks for them, and
    none of an earlier spec are left. ScalingLimited: nodes have no room for all instances.
    Progressing: instances are added, replaced or removed. Degraded: instances are missing, or one
    keeps failing."""


class InstancePool(Resource):
    """The instances of one role of an LLMDeployment."""

    kind: Literal["InstancePool"] = "InstancePool"
    spec: InstancePoolSpec
    """What is wanted."""
    status: InstancePoolStatus | None = None
    """What is."""

    rules = (name_rule(48),)
