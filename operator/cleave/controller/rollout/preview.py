"""Previews a rollout: every step from the running instances to the desired ones. Pure.

Called by `cleave rollout`; the steps are those that reconciles would take if each became ready.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.api.deployment import LLMDeploymentStatus
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.rollout import planner
from cleave.controller.rollout.planner import InstanceCount, RoleState, RolloutLimits, RolloutStep

_EARLIER_REVISION = "earlier"
"""Revision of instances that are of neither the running nor the new one; the status omits it."""


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Counts of running instances of one role."""

    total: int
    ready: int
    updated: int
    """Of the revision that was last desired."""


@dataclass(frozen=True, slots=True)
class RunningInstances:
    """The running instances."""

    revision: str | None
    """The revision that was last desired; None: there was none."""
    roles: Mapping[Role, RoleCounts]


@dataclass(frozen=True, slots=True)
class PreviewStage:
    """One step of a preview."""

    roles: Mapping[Role, RolloutStep]
    """Instances to keep or create."""
    capacity: float
    """Share of the planned capacity that serves until the new instances are ready."""
    started: Mapping[Role, int]
    stopped: Mapping[Role, int]


def from_pools(pools: Sequence[InstancePool], revision: str) -> RunningInstances:
    """Return the state in which all instances of a deployment's pools run."""
    counts = {pool.spec.role: RoleCounts(*[pool.spec.replicas] * 3) for pool in pools}
    return RunningInstances(revision, counts)


def from_status(status: LLMDeploymentStatus) -> RunningInstances:
    """Return the state that the status of a deployment reports."""
    counts = {
        each.role: RoleCounts(each.replicas, min(each.ready, each.replicas), each.updated)
        for each in status.roles
    }
    return RunningInstances(status.plan.revision if status.plan else None, counts)


def build_states(
    current: RunningInstances, pools: Sequence[InstancePool], revision: str
) -> dict[Role, RoleState]:
    """Return the states from which the rollout of `pools` with `revision` begins, by role."""
    desired = {pool.spec.role: pool.spec.replicas for pool in pools}
    states = {}
    for role in Role:
        if role in desired or role in current.roles:
            counts = current.roles.get(role, RoleCounts(0, 0, 0))
            states[role] = _build_state(counts, desired.get(role, 0), current, revision)
    return states


def build_stages(
    roles: Mapping[Role, RoleState], limits: RolloutLimits
) -> tuple[PreviewStage, ...]:
    """Return the present state, followed by every step."""
    now = {role: RolloutStep(state.new, state.old) for role, state in roles.items()}
    stages = [PreviewStage(now, planner.compute_capacity(roles), {}, {})]
    for step in planner.list_steps(roles, limits):
        reached = planner.apply_step(roles, step)
        started = {role: max(0, step[role].new - state.new) for role, state in roles.items()}
        stopped = {
            role: max(0, state.new - step[role].new) + state.old - step[role].old
            for role, state in roles.items()
        }
        stages.append(PreviewStage(step, planner.compute_capacity(reached), started, stopped))
        roles = planner.make_ready(reached)
    return tuple(stages)


def _build_state(
    counts: RoleCounts, replicas: int, current: RunningInstances, revision: str
) -> RoleState:
    """Counts of one role; instances that are not ready are assumed to be the newest."""
    updated = min(counts.updated, counts.total)
    earlier = InstanceCount(counts.total - updated, min(counts.ready, counts.total - updated))
    latest = InstanceCount(updated, counts.ready - earlier.ready)
    if current.revision == revision:
        return RoleState(replicas, earlier.total, earlier.ready, latest.total, latest.ready)
    by_revision = {_EARLIER_REVISION: earlier, current.revision or "": latest}
    older = {name: count for name, count in by_revision.items() if count.total}
    return RoleState(replicas, counts.total, counts.ready, older=older)
