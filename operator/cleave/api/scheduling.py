"""How engines order, cut and admit work: part of the engine.

Each field is followed where its phase runs: orders by instances that compute prompts, admission by
those that decode, both by mixed ones. An instance that changes its role follows the new role's.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.role import Role
from cleave.api.shape import Rule, Shape, keyed_by


class PromptOrder(StrEnum):
    """Which waiting prompt is computed next."""

    ARRIVAL = "Arrival"
    SHORTEST_FIRST = "ShortestFirst"
    LONGEST_FIRST = "LongestFirst"


class DecodeAdmission(StrEnum):
    """When a waiting request joins those that decode."""

    GREEDY = "Greedy"
    RESERVE_STATIC = "ReserveStatic"
    RESERVE_DYNAMIC = "ReserveDynamic"


class RoleLimits(Shape):
    """Limits of a pass while an instance has a role; never above what its engine started with."""

    role: Annotated[Role, Field(strict=False)]
    """prefill, decode or mixed."""
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most requests in one pass; absent: as planned for the role, or what the engine does."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens in one pass; absent: as planned for the role, or what the engine does."""


class Scheduling(Shape):
    """What each pass of an engine computes; a change of role changes it at once."""

    order: Annotated[PromptOrder, Field(strict=False)] = PromptOrder.ARRIVAL
    """Of waiting prompts. Arrival: the oldest first. ShortestFirst and LongestFirst: by length,
    within the oldest `sortedPrompts`."""
    sorted_prompts: Annotated[int, Field(ge=1, le=256)] = 16
    """The oldest prompts that are sorted at a time, against starvation."""
    long_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens of one prompt in a pass while other requests are there, so that a long prompt
    does not hold up short ones; absent: as many as the pass has room for."""
    admission: Annotated[DecodeAdmission, Field(strict=False)] = DecodeAdmission.GREEDY
    """When a request joins those that decode. Greedy: what it holds now fits. ReserveStatic: all
    that it is predicted to hold fits now. ReserveDynamic: everybody's still fits when the first of
    all is predicted to end."""
    preemption_limit: Annotated[int, Field(ge=1, le=1_000)] | None = None
    """Once preempted so often, a request is preempted only when no other can be; absent: no limit,
    the youngest goes first."""
    limits: Annotated[list[RoleLimits], keyed_by("role")] = Field(
        default_factory=list, max_length=3
    )
    """Limits of a pass, by role."""

    rules = (
        Rule(
            cel="!has(self.limits) || "
            "self.limits.all(a, self.limits.exists_one(b, b.role == a.role))",
            holds=lambda s: len({each.role for each in s.limits}) == len(s.limits),
            message="must not name a role twice",
            field="limits",
        ),
    )

    def limits_of(self, role: Role) -> RoleLimits:
        """What is stated for a role."""
        return next((each for each in self.limits if each.role == role), RoleLimits(role=role))
