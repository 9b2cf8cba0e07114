"""A roll-out before it happens: from what runs and what is wanted to every step. Pure.

Called by `cleave rollout`; the steps are those that the reconcile would take if each became ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cleave.api.deployment import LLMDeploymentStatus
from cleave.api.role import Role
from cleave.controller.rollout import (
    Count,
    RoleState,
    RolloutLimits,
    Step,
    after,
    capacity,
    steps,
    when_ready,
)
from cleave.planner.placement import Placement

_EARLIER = "earlier"
"""Name of what is of yet another revision than the one that runs: status does not tell more."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Instances of one role that run."""

    total: int
    ready: int
    updated: int
    """Of the revision that was wanted last."""


@dataclass(frozen=True, slots=True)
class Running:
    """What runs."""

    revision: str | None
    """The one that was wanted last; None: nothing was."""
    roles: Mapping[Role, Seen]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a preview."""

    roles: Mapping[Role, Step]
    """Instances that are kept or started."""
    capacity: float
    """Share of the plan that serves until the new instances are ready."""
    started: Mapping[Role, int]
    stopped: Mapping[Role, int]


def placed(placement: Placement, revision: str) -> Running:
    """All instances of a placement run."""
    return Running(
        revision,
        {pool.role: Seen(pool.replicas, pool.replicas, pool.replicas) for pool in placement.pools},
    )


def observed(status: LLMDeploymentStatus) -> Running:
    """What the status of a deployment tells."""
    return Running(
        status.plan.revision if status.plan else None,
        {
            each.role: Seen(each.replicas, min(each.ready, each.replicas), each.updated)
            for each in status.roles
        },
    )


def states(running: Running, placement: Placement, revision: str) -> dict[Role, RoleState]:
    """Where the roll-out of `placement` with `revision` begins, role by role."""
    wanted = {pool.role: pool.replicas for pool in placement.pools}
    return {
        role: _state(running.roles.get(role, Seen(0, 0, 0)), wanted.get(role, 0), running, revision)
        for role in Role
        if role in wanted or role in running.roles
    }


def stages(roles: Mapping[Role, RoleState], limits: RolloutLimits) -> tuple[Stage, ...]:
    """What is there, and then every step."""
    now = {role: Step(state.new, state.old) for role, state in roles.items()}
    found = [Stage(now, capacity(roles), {}, {})]
    for step in steps(roles, limits):
        reached = after(roles, step)
        started = {role: max(0, step[role].new - state.new) for role, state in roles.items()}
        stopped = {
            role: max(0, state.new - step[role].new) + state.old - step[role].old
            for role, state in roles.items()
        }
        found.append(Stage(step, capacity(reached), started, stopped))
        roles = when_ready(reached)
    return tuple(found)


def _state(seen: Seen, replicas: int, running: Running, revision: str) -> RoleState:
    """A role; of what is not ready, the newer instances are taken to be those."""
    updated = min(seen.updated, seen.total)
    earlier = Count(seen.total - updated, min(seen.ready, seen.total - updated))
    latest = Count(updated, seen.ready - earlier.ready)
    if running.revision == revision:
        return RoleState(
            replicas,
            old=earlier.total,
            old_ready=earlier.ready,
            new=latest.total,
            new_ready=latest.ready,
        )
    older = {_EARLIER: earlier, running.revision or "": latest}
    return RoleState(
        replicas,
        old=seen.total,
        old_ready=seen.ready,
        older={name: count for name, count in older.items() if count.total},
    )
