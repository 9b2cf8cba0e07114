"""How engines order, split and admit work: part of the engine.

Each field applies where its phase runs: prompt order on instances that compute prompts (InTimeFirst
on all), admission on those that decode, both on mixed ones. When an instance changes its role, the
new role's settings apply.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel, build_unique_rule, declare_list_map_key
from cleave.api.role import Role


class PromptOrder(StrEnum):
    """Which waiting prompt is computed next."""

    ARRIVAL = "Arrival"
    SHORTEST_FIRST = "ShortestFirst"
    LONGEST_FIRST = "LongestFirst"
    IN_TIME_FIRST = "InTimeFirst"


class DecodeAdmission(StrEnum):
    """When a waiting request joins those that decode."""

    GREEDY = "Greedy"
    RESERVE_STATIC = "ReserveStatic"
    RESERVE_DYNAMIC = "ReserveDynamic"
    WITHIN_TPOT = "WithinTpot"


class RoleLimits(ApiModel):
    """Limits of an engine iteration by role; at most those of the engine's start."""

    role: Annotated[Role, Field(strict=False)]
    """The role: prefill, decode or mixed."""
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum requests in one iteration; absent: the role's in the plan, or the engine's."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum tokens in one iteration; absent: the role's in the plan, or the engine's."""


class Scheduling(ApiModel):
    """What each iteration of an engine computes; a change of role changes it at once."""

    order: Annotated[PromptOrder, Field(strict=False)] = PromptOrder.ARRIVAL
    """Order of waiting prompts. Arrival: the oldest first. ShortestFirst and LongestFirst: by
    length, among the oldest `sortedPrompts`. InTimeFirst: by arrival, but those that can no longer
    meet `slo.ttftMs` wait behind all others, also before they are decoded."""
    sorted_prompts: Annotated[int, Field(ge=1, le=256)] = 16
    """Number of oldest prompts that are sorted at a time; it prevents starvation."""
    long_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum number of tokens of one prompt in an iteration while other requests wait or run, so
    that a long prompt does not delay short ones; absent: as many as the iteration has room for."""
    admission: Annotated[DecodeAdmission, Field(strict=False)] = DecodeAdmission.GREEDY
    """When a request joins those that decode. Greedy: its present KV blocks fit. ReserveStatic: all
    KV that it is predicted to need fits now. ReserveDynamic: the KV of all requests still fits when
    the first of them is predicted to end. WithinTpot: the engine's iterations still meet
    `slo.tpotMs`."""
    preemption_limit: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Number of preemptions after which a request is preempted only when no other can be; absent:
    no limit, the youngest request is preempted first."""
    limits: list[RoleLimits] = declare_list_map_key("role", default_factory=list, max_length=3)
    """Limits of an iteration, by role."""

    rules = (build_unique_rule("limits", "role", "role"),)

    @property
    def uses_targets(self) -> bool:
        """Whether engines need the latency targets of each request, which gateways send."""
        is_in_time = self.order is PromptOrder.IN_TIME_FIRST
        return is_in_time or self.admission is DecodeAdmission.WITHIN_TPOT

    def get_limits(self, role: Role) -> RoleLimits:
        """Return the limits that are given for a role."""
        return next((each for each in self.limits if each.role == role), RoleLimits(role=role))
