"""Families: placements of the same instances in any numbers, and the fewest that serve the rate.

A family is a mixed instance, a prefill and a decode instance (Algorithm 1) or a cell (Algorithm 2).
What is hard: cost. Numbers that the rate bound excludes are not simulated, nor are smaller ones
than some that failed; and a family is tried first at the largest numbers that the resources of the
best one so far buy, which most families fail. Short simulations only exclude what misses the target
by more than they err; what holds in them is simulated for longer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cleave.api.role import Role
from cleave.planner.search import packing
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.context import SearchContext
from cleave.planner.search.long_trials import (
    compute_least,
    measure_long,
    measure_mean,
    misses_by_decode,
)
from cleave.planner.search.part import PlacementPart
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Shares

_RELATIVE_TOLERANCE = 1e-9
_SHORT_TRIAL_SLACK = 0.3
"""A short trial may miss this share of what may be late, and a long one still meet the target."""
_FEW = 8
"""So many pairs of numbers are all tried; among more, those with the phases in balance are."""

_FIRST_STEP = 1.2
"""Factor of the first step up from the estimated numbers, and from there to the next."""

_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
_ANY = 1 << 30
"""More instances than there are."""

Counts = tuple[int, ...]
"""The number of cells, or of instances of each group."""


@dataclass(frozen=True, eq=False)
class PlacementFamily:
    """Placements of one unit (one instance of each group, or one cell) in any numbers."""

    search: SearchContext
    unit: CandidatePlacement
    parts: tuple[PlacementPart, ...]
    """What is counted; other families share them."""
    twins: "list[PlacementFamily]"
    """Families of the same instances with other limits of requests, and itself."""
    _shares: dict[Counts, Shares] = field(default_factory=dict)
    _long_shares: dict[Counts, Shares] = field(default_factory=dict)
    _means: dict[Counts, float] = field(default_factory=dict)
    """Mean shares of those that were tried with other requests as well."""
    _failed: list[Counts] = field(default_factory=list)

    @property
    def least(self) -> Counts:
        """Fewest that may serve the rate."""
        return tuple(part.least for part in self.parts)

    @property
    def prices(self) -> tuple[float, ...]:
        """Resources of each."""
        return tuple(part.price for part in self.parts)

    @property
    def bound(self) -> float:
        """Resources below which none of the family serves the rate."""
        return self.get_resources(self.least)

    @property
    def estimate(self) -> float:
        """Resources that are probably enough."""
        return self.get_resources(tuple(part.estimate for part in self.parts))

    def may_hold(self, limit: float) -> bool:
        """Whether placements of at most `limit` may serve the rate, by each part alone."""
        if not all(part.may_hold for part in self.parts):
            return False
        for part in (*self.parts, *self.parts[:1]) if len(self.parts) > 1 else ():
            left = min(limit, self._most) - self.bound
            if not part.narrow(part.least + int(left / part.price * (1 + _RELATIVE_TOLERANCE))):
                return False
        return True

    def get_resources(self, counts: Counts) -> float:
        """In the unit of the objective."""
        return sum(map(float.__mul__, map(float, counts), self.prices))

    def build(self, counts: Counts) -> CandidatePlacement:
        """The placement with these numbers."""
        if self.unit.is_in_node:
            return self.unit.with_copies(counts[0])
        added = zip(self.unit.groups, counts, strict=True)
        return self.unit.change_replicas({group.role: number - 1 for group, number in added})

    def find_smallest(self, limit: float) -> Counts | None:
        """Numbers that serve the rate with least resources, at most `limit`; None: none do. Those
        that take as much are only tried in a short trial (see `is_sound`)."""
        most = min(limit, self._most)
        if math.isinf(limit):
            likely = min(_FIRST_STEP * self.estimate, most)
            found = self._find_upwards(likely, most, self._may_be_enough)
            return found and self._find_upwards(self.get_resources(found), most, self._holds)
        if (equal := self._find_within(most, self._may_be_enough)) is None:
            return None
        return self._reduce(equal, self.bound, 0.0, self._holds)

    def _find_upwards(
        self, guess: float, limit: float, test: Callable[[Counts], bool]
    ) -> Counts | None:
        """Numbers with least resources that pass `test`; `guess` may be enough."""
        low, widen, failed = self.bound, _FIRST_STEP, False
        while (held := self._find_within(guess, test)) is None:
            if guess >= limit:
                return None
            low, guess, widen, failed = guess, min(guess * widen, limit), widen * widen, True
        step = (self.get_resources(held) - low) / 2 if failed else 0.0
        return self._reduce(held, low, step, test)

    def _reduce(
        self, held: Counts, low: float, step: float, test: Callable[[Counts], bool]
    ) -> Counts:
        """Numbers with least resources that pass `test`, above `low`; `held` is enough. Most
        families hold with as much as the best so far or fail with a little less, so go down in
        growing steps, and in smaller ones where that was too far."""
        while (high := self.get_resources(held)) > low:
            tried = max(min(high - step, high * (1 - 1000 * _RELATIVE_TOLERANCE)), low)
            smaller = self._find_within(tried, test)
            if smaller is not None:
                held = smaller
                step = min(max(2 * step, *self.prices), (self.get_resources(held) - low) / 2)
            elif step:
                low, step = tried, step / 4 if step > 4 * min(self.prices) else 0.0
            else:
                break
        return held

    def list_equals(self, counts: Counts) -> Iterator[Counts]:
        """All numbers that seem to serve the rate with the resources of `counts`, which does."""
        if len(counts) == 1:
            yield counts
            return
        taken = self.get_resources(counts)
        position = counts[0] - self.least[0]
        near = self._list_largest(taken)[max(position - _FEW // 2, 0) : position + _FEW]
        for first in near:
            other = self._complete(first, taken)
            if other is None or not math.isclose(self.get_resources(other), taken):
                continue
            if self._may_be_enough(other):
                yield other

    def is_sound(self, counts: Counts) -> bool:
        """Whether what holds in a short trial does so in long ones, with other requests too. If
        not, it no longer holds."""
        if self._holds(counts) and counts not in self._means:
            self._means[counts] = measure_mean(self.search, self.build(counts))
            if not self._is_enough(counts):
                self._failed.append(counts)
        return self._is_enough(counts)

    def is_near(self, limit: float) -> bool:
        """Whether some numbers almost hold, and `limit` is not excluded by a bound."""
        attainment = self.search.targets.attainment
        shares = (*(each.both for each in self._long_shares.values()), *self._means.values())
        is_near = any(each < attainment for each in shares)
        return is_near and self.bound <= limit

    def _may_be_enough(self, counts: Counts) -> bool:
        """Whether no trial so far says that they do not serve the rate."""
        if any(all(map(int.__le__, counts, failed)) for failed in self._failed):
            return False
        return self._measure(counts, self._least).both >= self._least_share

    def _holds(self, counts: Counts) -> bool:
        """Whether they serve the rate in a long trial; a short one excludes most."""
        if counts not in self._long_shares and self._may_be_enough(counts):
            self._long_shares[counts] = shares = self._measure_long(counts)
            self._record_failure(counts, shares, self.search.targets.attainment)
        return self._is_enough(counts)

    def _is_enough(self, counts: Counts) -> bool:
        if counts not in self._long_shares:
            return False
        share = self._means.get(counts, self._long_shares[counts].both)
        return share >= self.search.targets.attainment

    def _measure(self, counts: Counts, least: float) -> Shares:
        if counts not in self._shares:
            shares = self._find_same(counts, "_shares")
            if shares is None:
                search, placement = self.search, self.build(counts)
                rate = search.problem.rate / placement.copies
                shares = search.measure_shares(placement, rate, least)
            self._shares[counts] = shares
            self._record_failure(counts, shares, self._least_share)
        return self._shares[counts]

    def _measure_long(self, counts: Counts) -> Shares:
        search, placement = self.search, self.build(counts)
        rate, long = search.problem.rate / placement.copies, CONFIRMATION_PRECISION
        spans = (
            each.compute_span(rate, search.targets)
            for each in (search.trials, search.trials.with_precision(long))
        )
        is_long = next(spans).counted == next(spans).counted
        known = self._shares[counts] if is_long else self._find_same(counts, "_long_shares")
        return measure_long(search, placement, known)

    def _find_same(self, counts: Counts, of: str) -> Shares | None:
        """What a trial with other limits of requests showed that mattered in neither."""
        for twin in self.twins:
            shares: Shares | None = getattr(twin, of).get(counts)
            if shares is not None and all(
                most < min(one.instance.max_num_seqs, other.instance.max_num_seqs)
                for one, other in zip(self.unit.groups, twin.unit.groups, strict=True)
                if one.instance.max_num_seqs != other.instance.max_num_seqs
                for most in (shares.running_peaks[_ROLES.index(one.role)],)
            ):
                return shares
        return None

    def _record_failure(self, counts: Counts, shares: Shares, least: float) -> None:
        if shares.both < least:
            is_decode = len(counts) > 1 and misses_by_decode(shares, self.search.targets.attainment)
            self._failed.append((_ANY, *counts[1:]) if is_decode else counts)

    @property
    def _most(self) -> float:
        """More than any on all GPUs takes."""
        per_gpu = (part.price / part.unit.gpus for part in self.parts)
        return self.search.problem.max_gpus * max(per_gpu) * (1 + _RELATIVE_TOLERANCE)

    @property
    def _least(self) -> float:
        return min(self._least_share, compute_least(self.search.targets.attainment))

    @property
    def _least_share(self) -> float:
        attainment = self.search.targets.attainment
        return attainment - _SHORT_TRIAL_SLACK * (1 - attainment)

    def _find_within(self, limit: float, test: Callable[[Counts], bool]) -> Counts | None:
        """Numbers that pass `test`, among the largest for `limit`."""
        first = self._list_largest(limit)
        if len(first) <= _FEW:
            options = filter(None, (self._complete(number, limit) for number in first))
            return next(filter(test, options), None)
        while first:
            middle = len(first) // 2
            counts = self._complete(first[middle], limit)
            if counts is None:
                first = first[:middle]
                continue
            shares = self._measure(counts, 0.0)
            if test(counts):
                return counts
            first = first[middle + 1 :] if shares.ttft < shares.tpot else first[:middle]
        return None

    def _list_largest(self, limit: float) -> range:
        """The numbers of the first group with which `limit` also buys the least of the others."""
        others = sum(map(float.__mul__, map(float, self.least[1:]), self.prices[1:]))
        most = int((limit - others) / self.prices[0] * (1 + _RELATIVE_TOLERANCE))
        if len(self.prices) > 1:
            return range(self.least[0], most + 1)
        most = min(most, packing.count_copies(self.search.problem, self.unit, max(most, 0)))
        return range(most, most + 1) if most >= self.least[0] else range(0)

    def _complete(self, first: int, limit: float) -> Counts | None:
        """With as many of the second group as `limit` buys and the nodes have room for."""
        if len(self.prices) == 1:
            return (first,)
        left = limit - first * self.prices[0]
        most = int(left / self.prices[1] * (1 + _RELATIVE_TOLERANCE))
        low, high = self.least[1] - 1, most + 1
        if self._has_room((first, most)):
            return first, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has_room((first, middle)) else (low, middle)
        return (first, low) if low >= self.least[1] else None

    def _has_room(self, counts: Counts) -> bool:
        return packing.has_room(self.search.problem, self.build(counts))
