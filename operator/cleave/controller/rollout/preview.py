"""Previews a rollout: every step from the running instances to the desired ones. Pure.

Called by `cleave rollout`; the steps are those that reconciles would take if each became ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cleave.api.deployment import LLMDeploymentStatus
from cleave.api.role import Role
from cleave.controller.rollout.planner import (
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
"""Revision of instances that are neither of the running nor of the new one: the status does not
say."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Counts of running instances of one role."""

    total: int
    ready: int
    updated: int
    """Of the revision that was last desired."""


@dataclass(frozen=True, slots=True)
class Running:
    """The running instances."""

    revision: str | None
    """The revision that was last desired; None: there was none."""
    roles: Mapping[Role, Seen]


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a preview."""

    roles: Mapping[Role, Step]
    """Instances to keep or create."""
    capacity: float
    """Share of the planned capacity that serves until the new instances are ready."""
    started: Mapping[Role, int]
    stopped: Mapping[Role, int]


def placed(placement: Placement, revision: str) -> Running:
    """Return the state in which all instances of a placement run."""
    return Running(
        revision,
        {pool.role: Seen(pool.replicas, pool.replicas, pool.replicas) for pool in placement.pools},
    )


def observed(status: LLMDeploymentStatus) -> Running:
    """Return the state that the status of a deployment reports."""
    return Running(
        status.plan.revision if status.plan else None,
        {
            each.role: Seen(each.replicas, min(each.ready, each.replicas), each.updated)
            for each in status.roles
        },
    )


def states(current: Running, placement: Placement, revision: str) -> dict[Role, RoleState]:
    """Return where the rollout of `placement` with `revision` begins, by role."""
    desired = {pool.role: pool.replicas for pool in placement.pools}
    return {
        role: _state(
            current.roles.get(role, Seen(0, 0, 0)), desired.get(role, 0), current, revision
        )
        for role in Role
        if role in desired or role in current.roles
    }


def stages(roles: Mapping[Role, RoleState], limits: RolloutLimits) -> tuple[Stage, ...]:
    """Return the present state, followed by every step."""
    now = {role: Step(state.new, state.old) for role, state in roles.items()}
    stages_so_far = [Stage(now, capacity(roles), {}, {})]
    for step in steps(roles, limits):
        reached = after(roles, step)
        started = {role: max(0, step[role].new - state.new) for role, state in roles.items()}
        stopped = {
            role: max(0, state.new - step[role].new) + state.old - step[role].old
            for role, state in roles.items()
        }
        stages_so_far.append(Stage(step, capacity(reached), started, stopped))
        roles = when_ready(reached)
    return tuple(stages_so_far)


def _state(counts: Seen, replicas: int, current: Running, revision: str) -> RoleState:
    """Counts of one role; instances that are not ready are assumed to be the newest."""
    updated = min(counts.updated, counts.total)
    earlier = Count(counts.total - updated, min(counts.ready, counts.total - updated))
    latest = Count(updated, counts.ready - earlier.ready)
    if current.revision == revision:
        return RoleState(
            replicas,
            old=earlier.total,
            old_ready=earlier.ready,
            new=latest.total,
            new_ready=latest.ready,
        )
    older = {_EARLIER: earlier, current.revision or "": latest}
    return RoleState(
        replicas,
        old=counts.total,
        old_ready=counts.ready,
        older={name: count for name, count in older.items() if count.total},
    )
