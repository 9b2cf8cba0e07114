"""How many instances run while the plan stays the same: part of the LLMDeployment."""

from datetime import UTC, datetime
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

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


_CRON = r"^[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4}$"
"""Five fields; what they may say is for the parser to judge, which the API server has none of."""


def _checked(text: str) -> str:
    try:
        CronSim(text, datetime.now(UTC))
    except CronSimError as error:
        reason = f"must be a cron expression such as '50 8 * * 1-5' ({error})"
        raise PydanticCustomError("cron", "{reason}", {"reason": reason}) from error
    return text


class Peak(Shape):
    """More traffic than usual, at times that are known."""

    cron: Annotated[
        str,
        Field(min_length=9, max_length=128, pattern=_CRON),
        AfterValidator(_checked),
    ]
    """When it begins, in UTC: minute, hour, day of the month, month, day of the week. Earlier than
    the traffic by what instances take to start."""
    duration_s: Annotated[int, Field(ge=60, le=604_800)]
    """How long it lasts."""
    rate: Annotated[float, Field(gt=0, le=1_000_000)]
    """Requests per second to be ready for, at least."""


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

    schedule: Annotated[list[Peak], Field(max_length=32)] = Field(default_factory=list)
    """Known peaks. While one lasts, instances do not go to zero, and roles that scale have what its
    rate needs."""

    rules = (
        Rule(
            cel="!has(self.roles) || self.roles.all(r, self.roles.exists_one(q, q.role == r.role))",
            holds=lambda s: len({each.role for each in s.roles}) == len(s.roles),
            message="must not name a role twice",
            field="roles",
        ),
    )
