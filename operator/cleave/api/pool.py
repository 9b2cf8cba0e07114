"""InstancePool: the instances of one role of a deployment. Made by `cleave.pods`, read by it too.

One pool per role, because `/scale` carries a single number.
"""

from typing import Annotated, Literal

from pydantic import Field

from cleave.api.engine import Engine, Template
from cleave.api.model import ModelField
from cleave.api.resource import Conditions, Resource, name_rule
from cleave.api.role import Parallelism, Role
from cleave.api.shape import Shape

KIND = "InstancePool"


class InstancePoolSpec(Shape):
    """What is wanted."""

    deployment: Annotated[str, Field(max_length=40, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
    """The LLMDeployment that this pool belongs to."""
    role: Annotated[Role, Field(strict=False)]
    """What its instances serve."""
    replicas: Annotated[int, Field(ge=0, le=10000)] = 1
    """Instances."""
    parallelism: Parallelism = Parallelism()
    """How one instance is spread over GPUs."""
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
    selector: str | None = None
    """Label selector of its pods, for autoscalers."""
    conditions: Conditions = Field(default_factory=list)
    """Ready, Progressing, Degraded."""


class InstancePool(Resource):
    """The instances of one role of an LLMDeployment."""

    kind: Literal["InstancePool"] = "InstancePool"
    spec: InstancePoolSpec
    """What is wanted."""
    status: InstancePoolStatus | None = None
    """What is."""

    rules = (name_rule(48),)
