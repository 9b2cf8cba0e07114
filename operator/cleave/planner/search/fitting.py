"""The fewest instances, close to a given placement, that serve a load in simulation.

Called by the search for every pair of instances that it replicates. What is hard: cost. Every check
is a simulation of many thousand requests. So counts that the rate bound excludes are not simulated,
nor are fewer instances than some that failed, and large fleets change in large steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import capacity_bound, packing
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet
from cleave.planner.search.trials import Shares, Targets, Trials

_MOST_GROWTHS = 64
_GROWTH = 0.05
"""Share of a role's instances that one step adds."""
_LARGE = 16
"""From this many instances of a role on, two are removed at a time at first; from twice as many on,
four."""

_Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """The rate and the targets that a fleet has to meet."""

    rate: float
    targets: Targets


def shares(problem: Problem, trials: Trials, placement: Draft, load: Load) -> Shares:
    """Simulate one cell under `load`, the cell's own share."""
    span = trials.span(load.rate, load.targets)
    return trials.shares(cell_fleet(problem, placement), load.rate, load.targets, span)


@dataclass(slots=True)
class Fitting:
    """Adds and removes replicas of one placement; remembers the results of its trials."""

    problem: Problem
    trials: Trials
    load: Load
    """The load of all cells together."""
    _known: dict[_Counts, Shares] = field(default_factory=dict)
    _failed: list[_Counts] = field(default_factory=list)

    def grown(self, placement: Draft) -> Draft | None:
        """Add instances until the load is met; None: the nodes have no room for them."""
        for _ in range(_MOST_GROWTHS):
            if not packing.fits(self.problem, placement):
                return None
            lacking = self._lacking(placement)
            if lacking is not None:
                placement = self._more(placement, lacking)
            elif self.holds(placement):
                return placement
            else:
                larger = self._best_larger(placement)
                if larger is None:
                    return None
                placement = larger
        return None

    def shrunk(self, placement: Draft, mixed_group: Group | None = None) -> Draft:
        """Remove instances while the load is still met, always by the move that saves most.

        `mixed_group` is a mixed instance that may replace one prefill and one decode instance.
        """
        step = 1
        while max(_counts(placement)[1:]) >= _LARGE * step:
            step *= 2
        while step:
            feasible = (
                each for each in self._smaller(placement, mixed_group, step) if self.holds(each)
            )
            smaller = next(feasible, None)
            if smaller is None:
                step //= 2
            else:
                placement = smaller
        return placement

    def holds(self, placement: Draft) -> bool:
        """Whether every cell serves its share of the load within the targets."""
        counts = _counts(placement)
        if any(all(map(int.__le__, counts, failed)) for failed in self._failed):
            return False
        is_held = (
            self._lacking(placement) is None
            and self._shares(placement).both >= self.load.targets.attainment
        )
        if not is_held:
            self._failed.append(counts)
        return is_held

    def _shares(self, placement: Draft) -> Shares:
        counts = _counts(placement)
        if counts not in self._known:
            share = Load(self.load.rate / placement.copies, self.load.targets)
            self._known[counts] = shares(self.problem, self.trials, placement, share)
        return self._known[counts]

    def _lacking(self, placement: Draft) -> Role | None:
        """The role whose rate bound is below the load; None: no role's is."""
        rate = self.load.rate / placement.copies
        fleet = cell_fleet(self.problem, placement)
        lengths = self.trials.lengths(self.trials.span(rate, self.load.targets).total)
        if capacity_bound.fleet_rate(fleet, lengths) >= rate:
            return None
        if not fleet.prefill or not fleet.decode:
            return placement.groups[0].role
        prompts = sum(
            p.replicas * capacity_bound.prefill_rate(p.engine, lengths) for p in fleet.prefill
        )
        mixed = sum(
            p.replicas * capacity_bound.prefill_rate(p.engine, lengths) for p in fleet.mixed
        )
        return Role.PREFILL if prompts + mixed < rate else Role.DECODE

    def _best_larger(self, placement: Draft) -> Draft | None:
        """The step that improves attainment most; while it is 0, a step for the weaker phase."""
        steps = {group.role: self._more(placement, group.role) for group in placement.groups}
        feasible = {r: each for r, each in steps.items() if packing.fits(self.problem, each)}
        if not feasible:
            return None
        current = self._shares(placement)
        weak = Role.PREFILL if current.ttft < current.tpot else Role.DECODE
        if current.both == 0 and weak in feasible:
            return feasible[weak]
        return max(feasible.values(), key=lambda each: (self._shares(each).both, -each.gpus))

    def _more(self, placement: Draft, role: Role) -> Draft:
        grown = placement.changed({role: max(1, round(placement.replicas(role) * _GROWTH))})
        if placement.is_in_node and not packing.fits(self.problem, grown):
            return placement.copied(placement.copies + 1)
        return grown

    def _smaller(self, placement: Draft, mixed_group: Group | None, step: int) -> list[Draft]:
        """Placements that need less resources, the smallest first."""
        objective = self.problem.planning.objective
        limit = placement.resources(objective)
        feasible = [
            each
            for each in _moves(placement, mixed_group, step)
            if _is_whole(each)
            and each.resources(objective) < limit
            and packing.fits(self.problem, each)
        ]
        return sorted(feasible, key=lambda each: each.resources(objective))


def _moves(placement: Draft, mixed_group: Group | None, step: int) -> Iterator[Draft]:
    for roles in ((Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,), (Role.MIXED,)):
        if all(placement.replicas(role) for role in roles):
            yield placement.changed(dict.fromkeys(roles, -step))
    if placement.is_in_node and placement.copies > 1:
        yield placement.copied(placement.copies - 1)
    if step > 1 or not placement.is_disaggregated:
        return
    yield placement.changed({Role.PREFILL: -1, Role.DECODE: 1})
    yield placement.changed({Role.PREFILL: 1, Role.DECODE: -1})
    if (
        mixed_group is not None
        and placement.replicas(Role.PREFILL) > 1
        and placement.replicas(Role.DECODE) > 1
    ):
        yield placement.changed({Role.PREFILL: -1, Role.DECODE: -1}).joined(mixed_group)


def _counts(placement: Draft) -> _Counts:
    return (placement.copies, *(placement.replicas(role) for role in Role))


def _is_whole(placement: Draft) -> bool:
    """Whether both phases have instances, or all instances are mixed."""
    both = placement.replicas(Role.PREFILL) > 0 and placement.replicas(Role.DECODE) > 0
    return both or (bool(placement.groups) and all(g.role is Role.MIXED for g in placement.groups))
