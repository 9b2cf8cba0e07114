"""The placements of least resources that serve the rate, those with most goodput first.

Used for colocated instances and by both placement algorithms, which only differ in the units that
they give. What is hard: to leave out no better placement. A unit is left out only where the bound
of its rate says that it takes more than the best found, or a trial that it does not hold with as
much; equals are all compared by goodput; and long trials decide, not short ones: what they refuse
is not grown, but the search goes on among all others.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cleave.planner.search import goodput
from cleave.planner.search.batch_limits import list_variants
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell,
)
from cleave.planner.search.context import SearchContext
from cleave.planner.search.fitting import Counts, PlacementFamily
from cleave.planner.search.part import PlacementPart
from cleave.planner.search.trials import CONFIRMATION_PRECISION

_RELATIVE_TOLERANCE = 1e-9
_CLOSE_GOODPUT = 0.8
"""Placements with less than this share of the best one's goodput in short trials are left out: they
may be wrong by a fifth."""

_Member = tuple[PlacementFamily, Counts]
_Shape = tuple[tuple[object, ...], ...]
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Level:
    """Members of families that serve the rate in short trials, with the least resources."""

    resources: float = math.inf
    members: tuple[_Member, ...] = ()

    def merge(self, other: "_Level") -> "_Level":
        """The members of both that take least."""
        if not (self.members and other.members):
            return self if self.members else other
        if math.isclose(self.resources, other.resources, rel_tol=_RELATIVE_TOLERANCE):
            return _Level(self.resources, self.members + other.members)
        return min(self, other, key=lambda each: each.resources)


_NOTHING = _Level()


def list_smallest(
    search: SearchContext, units: Iterable[CandidatePlacement], most: int
) -> list[CandidatePlacement]:
    """Up to `most` placements of these units; empty: none serves the rate on the nodes. `units`:
    one instance of each group, or cells."""
    parts = _Parts(search)
    families = list(parts.build_families(units))
    refined: list[PlacementFamily] = []
    rates: dict[_Member, float] = {}
    level = _find_level(search, families, rates)
    while True:
        ranked = _rank_by_goodput(search, level, rates)
        near = [family for family in families if family.is_near(level.resources)]
        best = [members[0][0] for members in ranked[:1]]
        fresh = [each for each in dict.fromkeys(best + near) if each not in refined]
        if not fresh:
            return _confirm(search, ranked, rates)[:most]
        # Step limits are tried for the best unit and for those that just miss, not for all.
        refined += fresh
        finer = (unit for family in fresh for unit in list_variants(family.unit))
        level = _find_level(search, list(parts.build_families(finer)), rates, level)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of all families; those of equal groups are one."""

    search: SearchContext
    _parts: dict[_Key, PlacementPart] = field(default_factory=dict)
    _built: set[tuple[_Key, ...]] = field(default_factory=set)
    _twins: dict[tuple[_Key, ...], list[PlacementFamily]] = field(default_factory=dict)

    def build_families(self, units: Iterable[CandidatePlacement]) -> Iterator[PlacementFamily]:
        """The families of units, but those that were built before."""
        for unit in units:
            keys = tuple(_get_key(group) for group in unit.groups)
            if keys in self._built:
                continue
            self._built.add(keys)
            twins = self._twins.setdefault(tuple(each[:-1] for each in keys), [])
            family = PlacementFamily(self.search, unit, tuple(self._list_parts(unit, keys)), twins)
            twins.append(family)
            yield family

    def _list_parts(
        self, unit: CandidatePlacement, keys: Sequence[_Key]
    ) -> Iterator[PlacementPart]:
        if unit.is_in_node or len(keys) == 1:
            yield PlacementPart(self.search, unit)
            return
        for key, group in zip(keys, unit.groups, strict=True):
            if key not in self._parts:
                self._parts[key] = PlacementPart(self.search, CandidatePlacement((group,)))
            yield self._parts[key]


def _get_key(group: InstanceGroup) -> _Key:
    """What sets groups of one search apart; comparing their timings would take long."""
    each = group.instance
    limits = (each.max_num_batched_tokens, each.max_num_seqs)
    return group.role, group.replicas, id(each.candidate), each.batching, *limits


def _find_level(
    search: SearchContext,
    families: Sequence[PlacementFamily],
    rates: dict[_Member, float],
    known: _Level = _NOTHING,
) -> _Level:
    """All members of the families that take the fewest resources, with those `known`. Only the one
    with most goodput is tried in long trials, with other requests too: few fail there."""
    while True:
        level = known.merge(_find_level_of_short_trials(search, families, known.resources))
        if not level.members:
            return level
        while level.members:
            (best, *_), *_ = _rank_by_goodput(search, level, rates)
            if best[0].is_sound(best[1]):
                return level
            level = replace(level, members=tuple(m for m in level.members if m != best))
            for member in level.members:
                if not rates.get(member):
                    rates.pop(member, None)


def _find_level_of_short_trials(
    search: SearchContext, families: Sequence[PlacementFamily], limit: float
) -> _Level:
    level = _Level(limit)
    for family in sorted(families, key=lambda each: each.estimate):
        if family.bound > level.resources * (1 + _RELATIVE_TOLERANCE):
            continue
        search.tick(search.step)
        # Few variants share a part, so that trials of one phase alone would not pay for them.
        if math.isinf(limit) and not family.may_hold(level.resources):
            continue
        if (held := family.find_smallest(level.resources)) is not None:
            level = level.merge(_Level(family.get_resources(held), ((family, held),)))
    equals = ((f, each) for f, held in level.members for each in f.list_equals(held))
    return _Level(level.resources, tuple(equals))


def _rank_by_goodput(
    search: SearchContext, level: _Level, rates: dict[_Member, float]
) -> list[list[_Member]]:
    """The members by sizes and numbers of instances, those with most goodput first. A list has
    those that differ in step limits or in the division into cells only. `rates`: known goodput."""
    if len(level.members) == 1:
        return [list(level.members)]
    shapes: dict[_Shape, list[_Member]] = {}
    best_alike: dict[_Shape, float] = {}
    for member in level.members:
        family, counts = member
        placement = family.build(counts)
        shapes.setdefault(_get_shape(placement), []).append(member)
        kind = tuple(size[:-1] for size in _get_shape(placement))
        if member not in rates:
            best = max((rates.get(each, 0.0) for each in level.members), default=0.0)
            least_alike = best_alike.get(kind, 0.0) * (1 + goodput.TOLERANCE)
            at_least = max(best * _CLOSE_GOODPUT, least_alike)
            rates[member] = _measure_short(search, placement, at_least)
        best_alike[kind] = max(best_alike.get(kind, 0.0), rates[member])

    def get_rate(member: _Member) -> float:
        return rates[member]

    ordered = (sorted(members, key=get_rate, reverse=True) for members in shapes.values())
    return sorted(ordered, key=lambda members: get_rate(members[0]), reverse=True)


def _measure_short(search: SearchContext, placement: CandidatePlacement, at_least: float) -> float:
    """Goodput of all cells in short trials; 0: less than `at_least`."""
    fleet, copies = build_cell(search.problem, placement), placement.copies
    if not at_least:
        near = search.problem.rate / copies
        return copies * goodput.find_goodput_near(search.trials, fleet, search.targets, near).rate
    found = goodput.find_goodput(search.trials, fleet, search.targets, at_least / copies)
    return copies * found.rate


def _get_shape(placement: CandidatePlacement) -> _Shape:
    sizes = ((g, g.instance.candidate) for g in placement.groups)
    return tuple(
        (group.role, each.supply.gpu, each.parallelism, group.replicas * placement.copies)
        for group, each in sizes
    )


def _confirm(
    search: SearchContext, ranked: Sequence[Sequence[_Member]], rates: dict[_Member, float]
) -> list[CandidatePlacement]:
    """By goodput in long trials. Of each list the one with most in short trials and the first one
    are compared: instances that are short of memory seem too good in these. Of the best list all
    are: short trials may be wrong by more than their step limits differ."""
    close: list[_Member] = []
    for members in ranked:
        best = [member for member in members if rates.get(member)] or members[:1]
        if close and not rates.get(best[0]):
            break
        close += [each for each in dict.fromkeys((best[0], best[-1])) if each[0].is_sound(each[1])]
    alike = ranked[0] if close else ()
    if len(close) < 2 and len(alike) < 2:
        return [family.build(counts) for family, counts in close]
    long = search.with_precision(CONFIRMATION_PRECISION)
    confirmed: dict[CandidatePlacement, float] = {}
    for family, counts in close:
        near, placement = rates.get((family, counts), 0.0), family.build(counts)
        confirmed[placement] = _measure_goodput(long, placement, near, confirmed)
    for family, counts in (member for member in alike if member not in close):
        near, placement = max(confirmed.values()), family.build(counts)
        rate = _measure_goodput(long, placement, near, confirmed)
        if rate > near and family.is_sound(counts):
            confirmed[placement] = rate
    ordered = sorted(confirmed, key=confirmed.__getitem__, reverse=True)
    by_shape: dict[_Shape, CandidatePlacement] = {}
    for placement in ordered:
        by_shape.setdefault(_get_shape(placement), placement)
    return list(by_shape.values())


def _measure_goodput(
    search: SearchContext,
    placement: CandidatePlacement,
    near: float,
    rivals: dict[CandidatePlacement, float],
) -> float:
    """Goodput of all cells, probably `near`; 0: less than that of a rival."""
    fleet, copies = build_cell(search.problem, placement), placement.copies
    if rivals and (best := max(rivals.values()) / copies):
        span = search.trials.compute_span(best, search.targets)
        if not search.trials.holds(fleet, best, search.targets, span):
            return 0.0
    found = goodput.find_goodput_near(search.trials, fleet, search.targets, near / copies)
    return found.rate * copies
