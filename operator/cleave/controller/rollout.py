"""Roll-outs: how many instances of the new and of the old revisions to keep next. Pure.

Called by the reconciles, and by `cleave rollout` to show the whole way. What is hard: prefill and
decode instances of unlike revisions never work together, so an instance counts only with partners.
What a revision is worth is therefore a share of the plan: that of the role of which the smallest
part is ready. Old instances go when the new revision's share makes up for them, all roles in
proportion; the new revision takes the places that are left, all roles at once.

Nothing is remembered: each step follows from what is there, so that a restart, a lost instance, a
third revision or the way back are ordinary cases. Shares are fractions: rounding errors would cost
whole instances.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from cleave.api.role import Role


class RolloutError(ValueError):
    """With these limits nothing could ever be replaced."""


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What a roll-out may cost on its way."""

    max_surge: int = 1
    """Instances of a role above the wanted number."""
    max_unavailable: int = 0
    """Instances of a role that may be missing. Without a surge one of each role has to be, and what
    that is worth in the smallest role is missing of all."""
    max_skew: float = 0.25
    """How far one role's new instances may be ahead of another's, as a share of the role's."""

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
class Count:
    """Instances of one revision in one role."""

    total: int
    ready: int


@dataclass(frozen=True, slots=True)
class RoleState:
    """The instances of one role."""

    replicas: int
    """How many are wanted."""
    old: int = 0
    """Of other revisions; those that are being deleted do not count."""
    old_ready: int = 0
    new: int = 0
    """Of the wanted revision; those that are being deleted do not count."""
    new_ready: int = 0
    leaving: int = 0
    """Of any revision, being deleted: they take no new work and still hold their GPUs. Those on a
    lost node hold nothing; leave them out."""
    older: Mapping[str, Count] = field(default_factory=dict)
    """The old ones by revision, where there are several; empty: all are of one."""


@dataclass(frozen=True, slots=True)
class Step:
    """Instances of one role to keep."""

    new: int
    old: int
    older: Mapping[str, int] = field(default_factory=dict)
    """The old ones by revision, where the state tells them apart; they add up to `old`."""


Roles = Mapping[Role, RoleState]
_Revision = Mapping[Role, Count]
_NONE = Count(0, 0)


def next_step(roles: Roles, limits: RolloutLimits) -> dict[Role, Step]:
    """What to keep now of what is there, and how many new instances there should be.

    The same as what is there: something is awaited, or all is done. Roles that are not in `roles`
    are not touched; a role that the plan has dropped belongs there, with 0 replicas.
    """
    need = _need(roles, limits)
    revisions = _revisions(roles)
    new = _grown(roles, limits, need)
    kept = _kept(roles, revisions, need, limits.max_unavailable)
    if len(revisions) > 1 and not _moves(roles, new, kept):
        _yield_places(roles, limits, revisions, kept)
    return {
        role: Step(
            new=new[role],
            old=sum(counts[role] for counts in kept.values()),
            older={name: kept[name][role] if name in kept else 0 for name in state.older},
        )
        for role, state in roles.items()
    }


def steps(roles: Roles, limits: RolloutLimits) -> Iterable[dict[Role, Step]]:
    """Every step up to the end, when each becomes ready; bounded."""
    most = 4 + 2 * sum(state.replicas + state.old + state.new for state in roles.values())
    for _ in range(most):
        step = next_step(roles, limits)
        reached = when_ready(after(roles, step))
        if reached == roles:
            return
        yield step
        roles = reached


def is_done(roles: Roles) -> bool:
    """Whether all that is wanted is there, ready, and nothing else."""
    return all(
        state.new == state.new_ready == state.replicas and not state.old and not state.leaving
        for state in roles.values()
    )


def capacity(roles: Roles) -> float:
    """Share of the plan that can serve: of each revision what has partners, added up."""
    sizes = _sizes(roles)
    if not sizes:
        return 1.0
    old = sum(_share(counts, sizes) for counts in _revisions(roles).values())
    return float(_share(_new(roles), sizes) + old)


def after(roles: Roles, step: Mapping[Role, Step]) -> dict[Role, RoleState]:
    """What is there when the step is carried out, deletions are over and nothing new is ready yet.

    Instances that are not ready are the first to go.
    """
    return {
        role: RoleState(
            replicas=state.replicas,
            old=step[role].old,
            old_ready=min(state.old_ready, step[role].old),
            new=step[role].new,
            new_ready=min(state.new_ready, step[role].new),
            older={
                name: Count(kept, min(state.older[name].ready, kept))
                for name, kept in step[role].older.items()
            },
        )
        for role, state in roles.items()
    }


def when_ready(roles: Roles) -> dict[Role, RoleState]:
    """The same when every new instance has become ready."""
    return {
        role: RoleState(
            replicas=state.replicas,
            old=state.old,
            old_ready=state.old_ready,
            new=state.new,
            new_ready=state.new,
            older=state.older,
        )
        for role, state in roles.items()
    }


def _sizes(roles: Roles) -> dict[Role, int]:
    """The roles that the plan has, with their instances."""
    return {role: state.replicas for role, state in roles.items() if state.replicas > 0}


def _share(counts: _Revision, sizes: Mapping[Role, int]) -> Fraction:
    """What a revision is worth: the smallest part that is ready of any role."""
    parts = (Fraction(counts.get(role, _NONE).ready, size) for role, size in sizes.items())
    return min(parts, default=Fraction(1))


def _new(roles: Roles) -> _Revision:
    return {role: Count(state.new, state.new_ready) for role, state in roles.items()}


def _revisions(roles: Roles) -> dict[str, _Revision]:
    """The old revisions, those that are worth most first."""
    found: dict[str, dict[Role, Count]] = {}
    for role, state in roles.items():
        counts = state.older or {"": Count(state.old, state.old_ready)}
        for name, count in counts.items():
            if count.total:
                found.setdefault(name, {})[role] = count
    sizes = _sizes(roles)
    order = sorted(found, key=lambda name: (-_share(found[name], sizes), name))
    return {name: found[name] for name in order}


def _need(roles: Roles, limits: RolloutLimits) -> Fraction:
    """Share of the plan that old instances have to serve still."""
    sizes = _sizes(roles)
    if not sizes:
        return Fraction(0)
    missing = Fraction(limits.max_unavailable, max(sizes.values()))
    if limits.max_surge == 0:
        # No place is free before an old instance has gone, in each role.
        missing = max(missing, Fraction(1, min(sizes.values())))
    return max(Fraction(0), 1 - missing - _share(_new(roles), sizes))


def _grown(roles: Roles, limits: RolloutLimits, need: Fraction) -> dict[Role, int]:
    """New instances there should be: as many as there are places for, no role far ahead."""
    sizes = _sizes(roles)
    # Dropped by the plan: what is left of the role serves until the others can.
    grown = {role: roles[role].new if need else 0 for role in roles if role not in sizes}
    places = {role: _places(roles[role], limits) for role in sizes}
    starts = all(places.values())
    growing = (
        Fraction(places[role], size)
        for role, size in sizes.items()
        if places[role] > roles[role].new
    )
    furthest = min(growing, default=Fraction(0)) + Fraction(limits.max_skew)
    for role, size in sizes.items():
        wished = math.ceil(furthest * size) if starts else 0
        grown[role] = min(places[role], max(roles[role].new, wished))
    return grown


def _places(state: RoleState, limits: RolloutLimits) -> int:
    """Most new instances; those that are there stay, unless fewer are wanted."""
    free = state.replicas + limits.max_surge - state.old - state.leaving
    return min(state.replicas, max(state.new, free))


def _kept(
    roles: Roles, revisions: Mapping[str, _Revision], need: Fraction, max_unavailable: int
) -> dict[str, dict[Role, int]]:
    """Old instances to keep, by revision, so that they serve `need` of the plan.

    Where they cannot serve as much, instances without partners stay too, in the place of those that
    are missed: decode instances serve whole requests when they have to.
    """
    sizes = _sizes(roles)
    kept: dict[str, dict[Role, int]] = {}
    left = need
    for name, there in revisions.items():
        share = min(_share(there, sizes), left)
        kept[name] = {role: math.ceil(share * sizes.get(role, 0)) for role in roles}
        left -= share
    for role, state in roles.items():
        if role in sizes:
            least = state.replicas - max_unavailable - state.new_ready
            _fill(role, max(least, math.ceil(need * sizes[role]) if left else 0), kept, revisions)
        elif need:
            # The plan has dropped the role; all of it stays until the others can serve.
            _fill(role, state.old, kept, revisions)
    for counts in kept.values():
        _part_the_unpaired(counts)
    return kept


def _fill(
    role: Role, most: int, kept: Mapping[str, dict[Role, int]], revisions: Mapping[str, _Revision]
) -> None:
    """Keep more of the role, up to `most` of all revisions together."""
    missing = most - sum(counts[role] for counts in kept.values())
    for name, counts in kept.items():
        more = min(max(0, missing), revisions[name].get(role, _NONE).total - counts[role])
        counts[role] += more
        missing -= more


def _part_the_unpaired(kept: dict[Role, int]) -> None:
    """Prefill instances that have nobody to hand over to serve nothing."""
    takers = [role for role in kept if role is not Role.PREFILL]
    if Role.PREFILL in kept and takers and not any(kept[role] for role in takers):
        kept[Role.PREFILL] = 0


def _moves(roles: Roles, new: Mapping[Role, int], kept: Mapping[str, Mapping[Role, int]]) -> bool:
    """Whether anything changes by this step, or will by itself."""
    return any(
        new[role] != state.new
        or sum(counts[role] for counts in kept.values()) < state.old
        or state.new_ready < state.new
        or state.leaving
        for role, state in roles.items()
    )


def _yield_places(
    roles: Roles,
    limits: RolloutLimits,
    revisions: Mapping[str, _Revision],
    kept: Mapping[str, dict[Role, int]],
) -> None:
    """Keep one instance less where no place is left for the newest of three revisions.

    Pairs of several old revisions can take more places than those of one. Each role that is full
    gives up the instance by which least is lost: at most what one instance is worth.
    """
    sizes = _sizes(roles)
    for role, size in sizes.items():
        is_full = _places(roles[role], limits) == roles[role].new < size
        losses = {
            name: _loss(revisions[name], counts, role, sizes)
            for name, counts in kept.items()
            if counts[role]
        }
        if is_full and losses:
            kept[min(losses, key=lambda name: (losses[name], name))][role] -= 1
    for counts in kept.values():
        _part_the_unpaired(counts)


def _loss(
    counts: _Revision, kept: Mapping[Role, int], role: Role, sizes: Mapping[Role, int]
) -> Fraction:
    """What the kept instances of a revision are worth less without one of the role."""
    fewer = {**kept, role: kept[role] - 1}
    return _share(_cut(counts, kept), sizes) - _share(_cut(counts, fewer), sizes)


def _cut(counts: _Revision, kept: Mapping[Role, int]) -> _Revision:
    """What is left of a revision; instances that are not ready go first."""
    return {role: Count(kept[role], min(count.ready, kept[role])) for role, count in counts.items()}
