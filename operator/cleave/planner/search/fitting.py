"""The fewest instances, close to a given placement, that serve a load in simulation.

Called by the search for every pair of instances that it replicates. What is hard: cost. Every check
is a simulation of many thousand requests. So counts that the rate bound excludes are not simulated,
nor are fewer instances than some that failed, and large fleets change in large steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cleave.api.role import Role
from cleave.planner.search import capacity_bound, packing
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Shares

_MAX_GROWTH_STEPS = 64
_GROWTH_SHARE = 0.05
"""Share of a role's instances that one step adds."""
_LARGE_ROLE = 16
"""From this many instances of a role, two are removed at a time at first; from twice as many, 4."""

_Counts = tuple[int, ...]


@dataclass(slots=True)
class ReplicaFitter:
    """Adds and removes replicas of one placement; remembers the results of its trials."""

    search: SearchContext
    """The rate of its problem is the load of all cells together."""
    _shares_by_counts: dict[_Counts, Shares] = field(default_factory=dict)
    _failed_counts: list[_Counts] = field(default_factory=list)

    def grow(self, placement: CandidatePlacement) -> CandidatePlacement | None:
        """Add instances until the load is met; None: the nodes have no room for them."""
        for _ in range(_MAX_GROWTH_STEPS):
            if not self._has_room(placement):
                return None
            lacking = self._find_short_role(placement)
            if lacking is not None:
                placement = self._add_replicas(placement, lacking)
            elif self.holds(placement):
                return placement
            elif larger := self._find_best_larger(placement):
                placement = larger
            else:
                return None
        return None

    def shrink(
        self, placement: CandidatePlacement, mixed_group: InstanceGroup | None = None
    ) -> CandidatePlacement:
        """Remove instances while the load is still met, always by the move that saves most.
        `mixed_group` is a mixed instance that may replace one prefill and one decode instance."""
        step = 1
        while max(_get_counts(placement)[1:]) >= _LARGE_ROLE * step:
            step *= 2
        while step:
            feasible = filter(self.holds, self._list_smaller(placement, mixed_group, step))
            smaller = next(feasible, None)
            if smaller is None:
                step //= 2
            else:
                placement = smaller
        return placement

    def holds(self, placement: CandidatePlacement) -> bool:
        """Whether every cell serves its share of the load within the targets."""
        counts = _get_counts(placement)
        if any(all(map(int.__le__, counts, failed)) for failed in self._failed_counts):
            return False
        is_held = (
            self._find_short_role(placement) is None
            and self._simulate_shares(placement).both >= self.search.targets.attainment
        )
        if not is_held:
            self._failed_counts.append(counts)
        return is_held

    def _simulate_shares(self, placement: CandidatePlacement) -> Shares:
        counts = _get_counts(placement)
        if counts not in self._shares_by_counts:
            share = self.search.problem.rate / placement.copies
            self._shares_by_counts[counts] = self.search.measure_shares(placement, share)
        return self._shares_by_counts[counts]

    def _find_short_role(self, placement: CandidatePlacement) -> Role | None:
        """The role whose rate bound is below the load; None: no role's is."""
        search, rate = self.search, self.search.problem.rate / placement.copies
        fleet = build_cell(search.problem, placement)
        span = search.trials.compute_span(rate, search.targets)
        lengths = search.trials.get_lengths(span.total)
        if capacity_bound.compute_fleet_rate(fleet, lengths) >= rate:
            return None
        if not fleet.prefill or not fleet.decode:
            return placement.groups[0].role
        prompts = sum(
            pool.engines * capacity_bound.compute_prefill_rate(pool.engine, lengths)
            for pool in (*fleet.prefill, *fleet.mixed)
        )
        return Role.PREFILL if prompts < rate else Role.DECODE

    def _find_best_larger(self, placement: CandidatePlacement) -> CandidatePlacement | None:
        """The step that improves attainment most; while it is 0, a step for the weaker phase."""
        larger = {
            group.role: grown
            for group in placement.groups
            if self._has_room(grown := self._add_replicas(placement, group.role))
        }
        if not larger:
            return None
        current = self._simulate_shares(placement)
        weak = Role.PREFILL if current.ttft < current.tpot else Role.DECODE
        if current.both == 0 and weak in larger:
            return larger[weak]
        return max(larger.values(), key=lambda each: (self._simulate_shares(each).both, -each.gpus))

    def _add_replicas(self, placement: CandidatePlacement, role: Role) -> CandidatePlacement:
        added = max(1, round(placement.count_replicas(role) * _GROWTH_SHARE))
        grown = placement.change_replicas({role: added})
        if placement.is_in_node and not self._has_room(grown):
            return placement.with_copies(placement.copies + 1)
        return grown

    def _list_smaller(
        self, placement: CandidatePlacement, mixed_group: InstanceGroup | None, step: int
    ) -> list[CandidatePlacement]:
        """Placements that need less resources, the smallest first."""
        get_resources, limit = self.search.get_resources, self.search.get_resources(placement)
        feasible = [
            each
            for each in _list_moves(placement, mixed_group, step)
            if _serves_both_phases(each) and get_resources(each) < limit and self._has_room(each)
        ]
        return sorted(feasible, key=get_resources)

    def _has_room(self, placement: CandidatePlacement) -> bool:
        return packing.has_room(self.search.problem, placement)


def _list_moves(
    placement: CandidatePlacement, mixed_group: InstanceGroup | None, step: int
) -> Iterator[CandidatePlacement]:
    for roles in ((Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,), (Role.MIXED,)):
        if all(placement.count_replicas(role) for role in roles):
            yield placement.change_replicas(dict.fromkeys(roles, -step))
    if placement.is_in_node and placement.copies > 1:
        yield placement.with_copies(placement.copies - 1)
    if step > 1 or not placement.is_disaggregated:
        return
    yield placement.change_replicas({Role.PREFILL: -1, Role.DECODE: 1})
    yield placement.change_replicas({Role.PREFILL: 1, Role.DECODE: -1})
    phases = Role.PREFILL, Role.DECODE
    if mixed_group is not None and all(placement.count_replicas(role) > 1 for role in phases):
        yield placement.change_replicas({Role.PREFILL: -1, Role.DECODE: -1}).add_group(mixed_group)


def _get_counts(placement: CandidatePlacement) -> _Counts:
    return (placement.copies, *(placement.count_replicas(role) for role in Role))


def _serves_both_phases(placement: CandidatePlacement) -> bool:
    """Whether both phases have instances, or all instances are mixed."""
    both = placement.count_replicas(Role.PREFILL) > 0 and placement.count_replicas(Role.DECODE) > 0
    return both or (bool(placement.groups) and all(g.role is Role.MIXED for g in placement.groups))
