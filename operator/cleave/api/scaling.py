"""How many instances run while the plan stays the same: part of the LLMDeployment."""

from typing import Annotated

from pydantic import Field

from cleave.api.role import Role
from cleave.api.shape import Rule, Shape, keyed_by


class RoleScaling(Shape):
    """Bounds of one role's instances."""

    role: Annotated[Role, Field(strict=False)]
    """prefill, decode or mixed."""
    min_replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Fewest instances; all of them go only where idleS says so."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)]
    """Most instances."""

    rules = (
        Rule(
            cel="self.minReplicas <= self.maxReplicas",
            holds=lambda r: r.min_replicas <= r.max_replicas,
            message="must not be above maxReplicas",
            field="minReplicas",
        ),
    )


class Scaling(Shape):
    """How instances follow the rate between two plans, in a cluster."""

    roles: Annotated[list[RoleScaling], keyed_by("role")] = Field(
        default_factory=list, max_length=3
    )
    """Roles whose instances follow the rate of requests, by the line through simulated counts that
    comes with a plan (Aladdin, Eq. 7); absent: the plan's numbers stay. Pools whose spec.owner is
    not Plan are left alone."""
    calm_s: Annotated[int, Field(ge=10, le=1_800)] = 300
    """Instances come at once, and go when the rate of every minute of so many seconds could do
    without them."""
    idle_s: Annotated[int, Field(ge=10, le=604_800)] | None = None
    """Seconds without a request after which all instances go; the next request brings them back and
    waits for them at the gateway. Absent: they stay."""
    wake_timeout_s: Annotated[int, Field(ge=1, le=3_600)] = 600
    """How long a request waits for an instance where idleS is stated: as long as the slowest start
    takes. routing.queueLimit bounds how many wait in one gateway."""

    rules = (
        Rule(
            cel="!has(self.roles) || self.roles.all(r, self.roles.exists_one(q, q.role == r.role))",
            holds=lambda s: len({each.role for each in s.roles}) == len(s.roles),
            message="must not name a role twice",
            field="roles",
        ),
    )
