"""LLMDeployment: what a user asks for. Read by the planner and the pod builders.

The CRD and `kubectl explain` come from these classes. A field is here only when the present system
acts on it: one that is accepted and ignored would be a promise broken in silence.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from cleave.api.engine import Engine, Template
from cleave.api.model import ModelField
from cleave.api.planned import ManualPool, SelectedPlan
from cleave.api.planning import Planning
from cleave.api.resource import Conditions, Resource, name_rule
from cleave.api.role import Role
from cleave.api.shape import Rule, Shape, keyed_by
from cleave.api.workload import Workload

KIND = "LLMDeployment"


class Slo(Shape):
    """Latency targets, and the share of requests that must meet both."""

    ttft_ms: Annotated[float, Field(gt=0)]
    """Time to first token, queueing included, in milliseconds."""
    tpot_ms: Annotated[float, Field(gt=0)]
    """Time per output token after the first, in milliseconds."""
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of requests that must meet both targets."""


class ManualPlacement(Shape):
    """Instances per role."""

    manual: Annotated[
        list[ManualPool],
        Field(min_length=1, max_length=3),
        keyed_by("role"),
    ]
    """One entry per role."""

    rules = (
        Rule(
            cel="self.manual.all(p, self.manual.exists_one(q, q.role == p.role))",
            holds=lambda p: len({pool.role for pool in p.manual}) == len(p.manual),
            message="must not name a role twice",
            field="manual",
        ),
        Rule(
            cel="self.manual.exists(p, p.role != 'prefill')",
            holds=lambda p: any(pool.role is not Role.PREFILL for pool in p.manual),
            message="prefill instances need decode or mixed instances to hand their requests to",
            field="manual",
        ),
    )


class Fallback(StrEnum):
    """When one instance may do both phases of a request that is meant to be split."""

    ALWAYS = "Always"
    NEVER = "Never"
    ON_PREFILL_LOSS = "OnPrefillLoss"


class Routing(Shape):
    """How the gateway sends requests to instances."""

    fallback: Annotated[Fallback, Field(strict=False)] = Fallback.ALWAYS
    """When a decode instance also computes the prompt. Always: whenever no prefill instance can.
    OnPrefillLoss: only after a prefill instance failed the request. Never: answer 503 instead."""
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that wait for their first byte in one gateway; more are answered with 429."""


class LLMDeploymentSpec(Shape):
    """What is wanted."""

    model: ModelField
    """The model: its source as text, or an object."""
    slo: Slo
    """Latency targets."""
    workload: Workload | None = None
    """Expected traffic; absent: nothing can be planned from it."""
    planning: Planning = Planning()
    """How the planner chooses."""
    placement: ManualPlacement | None = None
    """Instances per role by hand; absent: planned."""
    routing: Routing = Routing()
    """How the gateway sends requests to instances."""
    engine: Engine = Engine()
    """The engine of every instance."""
    template: Template = Template()
    """Overrides for worker pods."""

    rules = (
        Rule(
            cel="self.routing.fallback != 'Never' || !has(self.placement) || "
            "self.placement.manual.exists(p, p.role != 'decode')",
            holds=lambda s: (
                s.routing.fallback is not Fallback.NEVER
                or s.placement is None
                or any(pool.role is not Role.DECODE for pool in s.placement.manual)
            ),
            message="Never leaves every request unserved when all instances are decode instances",
            field="routing.fallback",
        ),
    )


class RoleStatus(Shape):
    """Instances of one role."""

    role: Annotated[Role, Field(strict=False)]
    """prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=0)]
    """Instances that exist."""
    ready: Annotated[int, Field(ge=0)]
    """Instances that can take requests."""


class LLMDeploymentStatus(Shape):
    """What is."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that this status speaks of."""
    conditions: Conditions = Field(default_factory=list)
    """Ready, PlanReady, PrefillReady, DecodeReady, GatewayReady, KVPathVerified."""
    model: str | None = None
    """Name that clients ask for."""
    plan: SelectedPlan | None = None
    """The placement in force."""
    roles: Annotated[list[RoleStatus], keyed_by("role")] = Field(default_factory=list)
    """Instances, by role."""
    url: str | None = None
    """Base URL for OpenAI clients inside the cluster."""


class LLMDeployment(Resource):
    """Serves one large language model from prefill, decode and mixed instances."""

    kind: Literal["LLMDeployment"] = "LLMDeployment"
    spec: LLMDeploymentSpec
    """What is wanted."""
    status: LLMDeploymentStatus | None = None
    """What is."""

    rules = (name_rule(40),)
