"""Rollout planner: how many instances of the new and the old revisions to keep next. Pure.

Called by the reconciles, and by `cleave rollout` to show all steps. Prefill and decode instances of
different revisions never work together, so an instance counts only with partners. The share of the
plan that a revision serves is that of its role with the smallest ready fraction. Old instances are
deleted when the new revision's share makes up for them, in proportion over all roles; the new
revision grows into the free slots, in all roles at once.

No progress is stored: each step follows from the present counts, so that a restart, a lost
instance, a third revision or a rollback need no special case. Shares are fractions: rounding errors
would cost whole instances.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from cleave.api.role import Role


class RolloutError(ValueError):
    """With these limits no instance could ever be replaced."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """How far a rollout may deviate from the desired counts."""

    max_surge: int = 1
    """Instances of a role above its replicas."""
    max_unavailable: int = 0
    """Instances of a role that may be missing. Without a surge one of each role has to be missing,
    and the share of one instance in the smallest role is then missing in all."""
    max_skew: float = 0.25
    """How far one role's new instances may lead another's, as a share of the role."""

    def __post_init__(self) -> None:
        for name, value in (("maxSurge", self.max_surge), ("maxUnavailable", self.max_unavailable)):
            if value < 0:
                raise RolloutError(f"{name}: must be at least 0 (got {value})")
        if not (math.isfinite(self.max_skew) and self.max_skew >= 0):
            raise RolloutError(f"maxSkew: must be a number from 0 on (got {self.max_skew})")
        if self.max_surge + self.max_unavailable == 0:
            raise RolloutError(
                "maxSurge and maxUnavailable must not both be 0: nothing could be replaced; state "
                "maxSurge 1, or maxUnavailable 1 where no GPU is to spare"
            )


@dataclass(frozen=True, slots=True)
class InstanceCount:
    """Instances of one revision in one role."""

    total: int
    ready: int


@dataclass(frozen=True, slots=True)
class RoleState:
    """The present instances of one role."""

    replicas: int
    """The desired number."""
    old: int = 0
    """Of other revisions, without those that are being deleted."""
    old_ready: int = 0
    new: int = 0
    """Of the desired revision, without those that are being deleted."""
    new_ready: int = 0
    leaving: int = 0
    """Of any revision, being deleted: they take no requests but still occupy their GPUs. Leave out
    those on lost nodes, which occupy none."""
    older: Mapping[str, InstanceCount] = field(default_factory=dict)
    """The old ones by revision, if there are several; empty: all are of one."""


@dataclass(frozen=True, slots=True)
class RolloutStep:
    """Instances of one role to keep or create."""

    new: int
    old: int
    older: Mapping[str, int] = field(default_factory=dict)
    """The old ones by revision, where the state has them by revision; they add up to `old`."""


RoleStates = Mapping[Role, RoleState]
_Revision = Mapping[Role, InstanceCount]
_Revisions = Mapping[str, _Revision]
_KeptCounts = Mapping[str, dict[Role, int]]
_NONE = InstanceCount(0, 0)


def plan_next_step(roles: RoleStates, limits: RolloutLimits) -> dict[Role, RolloutStep]:
    """Return how many old and new instances of each role there should be now.

    Equal to the present counts: the rollout waits for instances to become ready or to end, or is
    complete. Roles that are not in `roles` stay as they are; a role that the plan has dropped is
    given with 0 replicas.

    1. Share that old instances still have to serve. 2. New instances that fit. 3. Old instances to
    keep for that share. 4. If nothing changes with several old revisions, delete one.
    """
    need = _compute_need(roles, limits)
    revisions = _list_old_revisions(roles)
    new = _grow(roles, limits, need)
    to_keep = _keep_old(roles, revisions, need, limits.max_unavailable)
    if len(revisions) > 1 and not _changes_anything(roles, new, to_keep):
        _make_room(roles, limits, revisions, to_keep)
    return {
        role: RolloutStep(
            new=new[role],
            old=sum(counts[role] for counts in to_keep.values()),
            older={name: to_keep[name][role] if name in to_keep else 0 for name in state.older},
        )
        for role, state in roles.items()
    }


def list_steps(roles: RoleStates, limits: RolloutLimits) -> Iterable[dict[Role, RolloutStep]]:
    """Yield every step to the end, if each becomes ready; the number of steps is bounded."""
    most = 4 + 2 * sum(state.replicas + state.old + state.new for state in roles.values())
    for _ in range(most):
        step = plan_next_step(roles, limits)
        state_after = make_ready(apply_step(roles, step))
        if state_after == roles:
            return
        yield step
        roles = state_after


def is_done(roles: RoleStates) -> bool:
    """Whether exactly the desired instances exist and are ready."""
    return all(
        state.new == state.new_ready == state.replicas and not state.old and not state.leaving
        for state in roles.values()
    )


def compute_capacity(roles: RoleStates) -> float:
    """Share of the plan that can serve: summed over revisions, as far as partners exist."""
    sizes = _list_sizes(roles)
    if not sizes:
        return 1.0
    old = sum(_compute_share(counts, sizes) for counts in _list_old_revisions(roles).values())
    return float(_compute_share(_get_new_counts(roles), sizes) + old)


def apply_step(roles: RoleStates, step: Mapping[Role, RolloutStep]) -> dict[Role, RoleState]:
    """State after a step and its deletions, unready ones first; no new instance is ready."""
    return {
        role: RoleState(
            replicas=state.replicas,
            old=step[role].old,
            old_ready=min(state.old_ready, step[role].old),
            new=step[role].new,
            new_ready=min(state.new_ready, step[role].new),
            older={
                name: InstanceCount(num_kept, min(state.older[name].ready, num_kept))
                for name, num_kept in step[role].older.items()
            },
        )
        for role, state in roles.items()
    }


def make_ready(roles: RoleStates) -> dict[Role, RoleState]:
    """State once every new instance is ready."""
    return {role: replace(state, new_ready=state.new, leaving=0) for role, state in roles.items()}


def _list_sizes(roles: RoleStates) -> dict[Role, int]:
    """Replicas of the roles that the plan has."""
    return {role: state.replicas for role, state in roles.items() if state.replicas > 0}


def _compute_share(counts: _Revision, sizes: Mapping[Role, int]) -> Fraction:
    """Share of the plan that a revision serves: its smallest ready fraction of any role."""
    parts = (Fraction(counts.get(role, _NONE).ready, size) for role, size in sizes.items())
    return min(parts, default=Fraction(1))


def _get_new_counts(roles: RoleStates) -> _Revision:
    return {role: InstanceCount(state.new, state.new_ready) for role, state in roles.items()}


def _list_old_revisions(roles: RoleStates) -> dict[str, _Revision]:
    """The old revisions, those with the largest share first."""
    by_name: dict[str, dict[Role, InstanceCount]] = {}
    for role, state in roles.items():
        counts = state.older or {"": InstanceCount(state.old, state.old_ready)}
        for name, count in counts.items():
            if count.total:
                by_name.setdefault(name, {})[role] = count
    sizes = _list_sizes(roles)
    order = sorted(by_name, key=lambda name: (-_compute_share(by_name[name], sizes), name))
    return {name: by_name[name] for name in order}


def _compute_need(roles: RoleStates, limits: RolloutLimits) -> Fraction:
    """Share of the plan that old instances still have to serve."""
    sizes = _list_sizes(roles)
    if not sizes:
        return Fraction(0)
    missing = Fraction(limits.max_unavailable, max(sizes.values()))
    if limits.max_surge == 0:
        # Without a surge there is no free slot in a role before an old instance has ended.
        missing = max(missing, Fraction(1, min(sizes.values())))
    return max(Fraction(0), 1 - missing - _compute_share(_get_new_counts(roles), sizes))


def _grow(roles: RoleStates, limits: RolloutLimits, need: Fraction) -> dict[Role, int]:
    """New instances of each role: as many as fit, with no role far ahead of the others."""
    sizes = _list_sizes(roles)
    # Roles that the plan has dropped keep serving until the others can.
    grown = {role: roles[role].new if need else 0 for role in roles if role not in sizes}
    slots = {role: _compute_max_new(roles[role], limits) for role in sizes}
    starts = all(slots.values())
    growing = (Fraction(slots[r], sizes[r]) for r in sizes if slots[r] > roles[r].new)
    furthest = min(growing, default=Fraction(0)) + Fraction(limits.max_skew)
    for role, size in sizes.items():
        target = math.ceil(furthest * size) if starts else 0
        grown[role] = min(slots[role], max(roles[role].new, target))
    return grown


def _compute_max_new(state: RoleState, limits: RolloutLimits) -> int:
    """Most new instances that fit; existing ones stay, unless fewer are desired."""
    free = state.replicas + limits.max_surge - state.old - state.leaving
    return min(state.replicas, max(state.new, free))


def _keep_old(
    roles: RoleStates, revisions: _Revisions, need: Fraction, max_unavailable: int
) -> dict[str, dict[Role, int]]:
    """Old instances to keep, by revision, so that they serve `need` of the plan.

    Where they cannot serve as much, instances without partners stay in the place of the missing
    ones: decode instances serve both phases when they have to.
    """
    sizes = _list_sizes(roles)
    to_keep: dict[str, dict[Role, int]] = {}
    remaining = need
    for name, counts_by_role in revisions.items():
        share = min(_compute_share(counts_by_role, sizes), remaining)
        to_keep[name] = {role: math.ceil(share * sizes.get(role, 0)) for role in roles}
        remaining -= share
    for role, state in roles.items():
        if role in sizes:
            min_kept = state.replicas - max_unavailable - state.new_ready
            most = max(min_kept, math.ceil(need * sizes[role]) if remaining else 0)
            _keep_more(role, most, to_keep, revisions)
        elif need:
            # The plan has dropped the role; its instances stay until the others can serve.
            _keep_more(role, state.old, to_keep, revisions)
    for counts in to_keep.values():
        _drop_unpaired_prefill(counts)
    return to_keep


def _keep_more(role: Role, most: int, to_keep: _KeptCounts, revisions: _Revisions) -> None:
    """Keep more of the role, up to `most` over all revisions."""
    missing = most - sum(counts[role] for counts in to_keep.values())
    for name, counts in to_keep.items():
        num_extra = min(max(0, missing), revisions[name].get(role, _NONE).total - counts[role])
        counts[role] += num_extra
        missing -= num_extra


def _drop_unpaired_prefill(to_keep: dict[Role, int]) -> None:
    """Drop prefill instances that have no instance to transfer KV to: they serve nothing."""
    receivers = [role for role in to_keep if role is not Role.PREFILL]
    if Role.PREFILL in to_keep and receivers and not any(to_keep[role] for role in receivers):
        to_keep[Role.PREFILL] = 0


def _changes_anything(
    roles: RoleStates, new: Mapping[Role, int], to_keep: Mapping[str, Mapping[Role, int]]
) -> bool:
    """Whether this step changes anything, or instances are starting or ending."""
    return any(
        new[role] != state.new
        or sum(counts[role] for counts in to_keep.values()) < state.old
        or state.new_ready < state.new
        or state.leaving
        for role, state in roles.items()
    )


def _make_room(
    roles: RoleStates, limits: RolloutLimits, revisions: _Revisions, to_keep: _KeptCounts
) -> None:
    """Keep one old instance less where no slot is free for the newest of three revisions.

    Pairs of several old revisions can take more slots than those of one. Each full role gives up
    the instance that costs the smallest share: at most that of one instance.
    """
    sizes = _list_sizes(roles)
    for role, size in sizes.items():
        is_full = _compute_max_new(roles[role], limits) == roles[role].new < size
        losses = {
            name: _compute_loss(revisions[name], counts, role, sizes)
            for name, counts in to_keep.items()
            if counts[role]
        }
        if is_full and losses:
            to_keep[min(losses, key=lambda name: (losses[name], name))][role] -= 1
    for counts in to_keep.values():
        _drop_unpaired_prefill(counts)


def _compute_loss(
    counts: _Revision, to_keep: Mapping[Role, int], role: Role, sizes: Mapping[Role, int]
) -> Fraction:
    """Share that a revision loses without one of the role's kept instances."""
    fewer = {**to_keep, role: to_keep[role] - 1}
    before, after = (_compute_share(_reduce(counts, each), sizes) for each in (to_keep, fewer))
    return before - after


def _reduce(counts: _Revision, to_keep: Mapping[Role, int]) -> _Revision:
    """A revision reduced to the kept instances; those that are not ready are dropped first."""
    return {r: InstanceCount(to_keep[r], min(each.ready, to_keep[r])) for r, each in counts.items()}
