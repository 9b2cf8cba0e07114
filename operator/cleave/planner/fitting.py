"""The fewest instances, near those of a draft, whose simulation holds a load.

Called by the search for every pair of instances that it replicates. What is hard: cost. Every
answer here is a simulation of many thousand requests, so counts that the passes alone rule out are
never simulated, nor fewer instances than some that failed, and large fleets move in large steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from cleave.api.role import Role
from cleave.planner import capacity, packing
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.problem import Problem
from cleave.planner.trials import Shares, Targets, Trials

_MOST_GROWTHS = 64
_GROWTH = 0.05
"""Part of a role's instances that one step adds."""
_LARGE = 16
"""So many instances of a role move two at a time at first, twice as many four at a time."""

_Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What a fleet has to hold."""

    rate: float
    targets: Targets


def shares(problem: Problem, trials: Trials, draft: Draft, load: Load) -> Shares:
    """Of one cell at its share of the rate (`load` is a cell's)."""
    span = trials.span(load.rate, load.targets)
    return trials.shares(cell_fleet(problem, draft), load.rate, load.targets, span)


@dataclass(slots=True)
class Fitting:
    """All trials of drafts that differ only in how many of their instances there are."""

    problem: Problem
    trials: Trials
    load: Load
    """Of all cells together."""
    _known: dict[_Counts, Shares] = field(default_factory=dict)
    _failed: list[_Counts] = field(default_factory=list)

    def grown(self, draft: Draft) -> Draft | None:
        """With instances added until the load is held; None: the nodes have no room for them."""
        for _ in range(_MOST_GROWTHS):
            if not packing.fits(self.problem, draft):
                return None
            lacking = self._lacking(draft)
            if lacking is not None:
                draft = self._more(draft, lacking)
            elif self.holds(draft):
                return draft
            else:
                larger = self._best_larger(draft)
                if larger is None:
                    return None
                draft = larger
        return None

    def shrunk(self, draft: Draft, spare: Group | None = None) -> Draft:
        """Without what the load is held without: the move that saves most, until there is none.

        `spare` is a mixed instance that may stand in for a prefill and a decode instance.
        """
        step = 1
        while max(_counts(draft)[1:]) >= _LARGE * step:
            step *= 2
        while step:
            able = (each for each in self._smaller(draft, spare, step) if self.holds(each))
            smaller = next(able, None)
            if smaller is None:
                step //= 2
            else:
                draft = smaller
        return draft

    def holds(self, draft: Draft) -> bool:
        """Whether every cell serves its share of the load within the targets."""
        counts = _counts(draft)
        if any(all(map(int.__le__, counts, failed)) for failed in self._failed):
            return False
        held = (
            self._lacking(draft) is None
            and self._shares(draft).both >= self.load.targets.attainment
        )
        if not held:
            self._failed.append(counts)
        return held

    def _shares(self, draft: Draft) -> Shares:
        counts = _counts(draft)
        if counts not in self._known:
            share = Load(self.load.rate / draft.copies, self.load.targets)
            self._known[counts] = shares(self.problem, self.trials, draft, share)
        return self._known[counts]

    def _lacking(self, draft: Draft) -> Role | None:
        """The role whose passes alone take longer than the load leaves; None: none."""
        rate = self.load.rate / draft.copies
        fleet = cell_fleet(self.problem, draft)
        lengths = self.trials.lengths(self.trials.span(rate, self.load.targets).total)
        if capacity.fleet_rate(fleet, lengths) >= rate:
            return None
        if not fleet.prefill or not fleet.decode:
            return draft.groups[0].role
        prompts = sum(p.replicas * capacity.prefill_rate(p.engine, lengths) for p in fleet.prefill)
        mixed = sum(p.replicas * capacity.prefill_rate(p.engine, lengths) for p in fleet.mixed)
        return Role.PREFILL if prompts + mixed < rate else Role.DECODE

    def _best_larger(self, draft: Draft) -> Draft | None:
        """The step that helps most; where none helps yet, one for the phase that is worse off."""
        steps = {group.role: self._more(draft, group.role) for group in draft.groups}
        able = {r: each for r, each in steps.items() if packing.fits(self.problem, each)}
        if not able:
            return None
        now = self._shares(draft)
        weak = Role.PREFILL if now.ttft < now.tpot else Role.DECODE
        if now.both == 0 and weak in able:
            return able[weak]
        return max(able.values(), key=lambda each: (self._shares(each).both, -each.gpus))

    def _more(self, draft: Draft, role: Role) -> Draft:
        grown = draft.changed({role: max(1, round(draft.replicas(role) * _GROWTH))})
        if draft.is_in_node and not packing.fits(self.problem, grown):
            return draft.copied(draft.copies + 1)
        return grown

    def _smaller(self, draft: Draft, spare: Group | None, step: int) -> list[Draft]:
        """Drafts that take less, the least first."""
        objective = self.problem.planning.objective
        limit = draft.resources(objective)
        able = [
            each
            for each in _moves(draft, spare, step)
            if _is_whole(each)
            and each.resources(objective) < limit
            and packing.fits(self.problem, each)
        ]
        return sorted(able, key=lambda each: each.resources(objective))


def _moves(draft: Draft, spare: Group | None, step: int) -> Iterator[Draft]:
    for roles in ((Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,), (Role.MIXED,)):
        if all(draft.replicas(role) for role in roles):
            yield draft.changed(dict.fromkeys(roles, -step))
    if draft.is_in_node and draft.copies > 1:
        yield draft.copied(draft.copies - 1)
    if step > 1 or not draft.is_disaggregated:
        return
    yield draft.changed({Role.PREFILL: -1, Role.DECODE: 1})
    yield draft.changed({Role.PREFILL: 1, Role.DECODE: -1})
    if spare is not None and draft.replicas(Role.PREFILL) > 1 and draft.replicas(Role.DECODE) > 1:
        yield draft.changed({Role.PREFILL: -1, Role.DECODE: -1}).joined(spare)


def _counts(draft: Draft) -> _Counts:
    return (draft.copies, *(draft.replicas(role) for role in Role))


def _is_whole(draft: Draft) -> bool:
    """Whether both phases have instances of their own, or all instances are mixed."""
    both = draft.replicas(Role.PREFILL) > 0 and draft.replicas(Role.DECODE) > 0
    return both or (bool(draft.groups) and all(g.role is Role.MIXED for g in draft.groups))
