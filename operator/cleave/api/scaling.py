"""How many instances run while the plan stays the same: part of the LLMDeployment."""

from datetime import UTC, datetime
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from cleave.api.base import ApiModel, ValidationRule, build_unique_rule, declare_list_map_key
from cleave.api.role import Role


class RoleScaling(ApiModel):
    """Limits of one role's instances."""

    role: Annotated[Role, Field(strict=False)]
    """The role: prefill, decode or mixed."""
    min_replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Minimum number of instances; scaling to zero is controlled by idleS only."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)]
    """Maximum number of instances."""

    rules = (
        ValidationRule(
            cel="self.minReplicas <= self.maxReplicas",
            is_valid=lambda r: r.min_replicas <= r.max_replicas,
            message="must not be above maxReplicas",
            field="minReplicas",
        ),
    )


_CRON = r"^[0-9A-Za-z*,/#-]+( [0-9A-Za-z*,/#-]+){4}$"
"""Five fields; their values are checked by the parser, which the API server does not have."""


def _check_cron(text: str) -> str:
    try:
        CronSim(text, datetime.now(UTC))
    except CronSimError as error:
        reason = f"must be a cron expression such as '50 8 * * 1-5' ({error})"
        raise PydanticCustomError("cron", "{reason}", {"reason": reason}) from error
    return text


class ScheduledPeak(ApiModel):
    """A period of known higher traffic."""

    cron: Annotated[
        str, Field(min_length=9, max_length=128, pattern=_CRON), AfterValidator(_check_cron)
    ]
    """When the period begins, in UTC, as cron expression: minute, hour, day of the month, month,
    day of the week. Set it earlier than the traffic, by the time that instances take to start."""
    duration_s: Annotated[int, Field(ge=60, le=604_800)]
    """Length of the period in seconds."""
    rate: Annotated[float, Field(gt=0, le=1_000_000)]
    """Minimum rate, in requests per second, that instances are provided for."""


class Scaling(ApiModel):
    """How the number of instances follows the request rate between two plans, in a cluster."""

    roles: list[RoleScaling] = declare_list_map_key("role", default_factory=list, max_length=3)
    """Roles whose number of instances follows the request rate, by the scaling law of the plan (a
    line through simulated counts; Aladdin, Eq. 7). Absent: the plan's numbers stay. Pools whose
    spec.owner is not Plan are not scaled."""
    calm_s: Annotated[int, Field(ge=10, le=1_800)] = 300
    """Instances are added at once, and removed if each minute in this many seconds needs fewer."""
    idle_s: Annotated[int, Field(ge=10, le=604_800)] | None = None
    """Seconds without a request after which the deployment is scaled to zero. The next request
    starts the instances again and waits for them at the gateway. Absent: it is never scaled to
    zero."""
    wake_timeout_s: Annotated[int, Field(ge=1, le=3_600)] = 600
    """Maximum time in seconds that a request waits for an instance if idleS is set; choose at least
    the slowest start of an instance. routing.queueLimit limits how many requests wait in one
    gateway."""

    schedule: Annotated[list[ScheduledPeak], Field(max_length=32)] = Field(default_factory=list)
    """Periods of known higher traffic. During such a period the deployment is not scaled to zero,
    and scaled roles have the instances that its rate needs."""

    rules = (build_unique_rule("roles", "role", "role"),)
