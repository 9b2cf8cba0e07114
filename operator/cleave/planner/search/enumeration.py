"""Placements of each algorithm that serve the requested rate, for the search to predict and rank.

Called by `plan_search.plan`. An algorithm that yields no placement found none: no instance meets
its targets, or the nodes have no room for as many as the rate needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from cleave.api.planning import Affinity
from cleave.api.role import Role
from cleave.planner.plan import LOW_AFFINITY
from cleave.planner.problem import Problem
from cleave.planner.search import colocated, high_affinity, low_affinity, replication
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import Candidate, group_by_gpu, list_candidates
from cleave.planner.search.context import CloseCall, SearchContext
from cleave.planner.search.high_affinity import Pair
from cleave.planner.search.long_trials import holds
from cleave.planner.search.low_affinity import UNLIMITED
from cleave.planner.search.packing import count_copies, has_room
from cleave.planner.search.smallest import list_smallest

HIGH, LOW, COLOCATED = "Algorithm 1", LOW_AFFINITY, "colocated"
_MAX_DISAGGREGATED = 2
"""Disaggregated placements that are predicted: equals by resources, with most goodput."""


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """A placement and whether it serves the rate; if not, it uses all GPUs of the nodes."""

    placement: CandidatePlacement
    algorithm: str
    holds_rate: bool


_Placed = TypeVar("_Placed", PlacementOption, CloseCall)


def enumerate_placements(
    search: SearchContext, feasible: Sequence[Candidate], chosen: Affinity
) -> list[PlacementOption]:
    """Placements of every algorithm; of very many GPUs, of equal parts of them."""
    parts = replication.count_parts(search, feasible)
    if parts == 1:
        return _list_whole(search, feasible, chosen)
    options: list[PlacementOption] = []
    for part in search.divide(parts):
        found = _list_whole(part, list_candidates(part.problem), chosen)
        options = [_join_parts(each, search.problem, part.problem, parts) for each in found]
        if all(has_room(search.problem, each.placement) for each in options):
            break
    near = (_join_parts(each, search.problem, part.problem, parts) for each in part.close_calls)
    search.close_calls.extend(near)
    return options


def _join_parts(of: _Placed, problem: Problem, part: Problem, parts: int) -> _Placed:
    """The same with so many times the cells, on the nodes of the whole problem."""
    supplies = dict(zip(part.supplies, problem.supplies, strict=True))
    groups = tuple(
        replace(
            group, instance=group.instance.with_supply(supplies[group.instance.candidate.supply])
        )
        for group in of.placement.groups
    )
    copies = of.placement.copies * parts
    return replace(of, placement=replace(of.placement, groups=groups, copies=copies))


def _list_whole(
    search: SearchContext, found: Sequence[Candidate], chosen: Affinity
) -> list[PlacementOption]:
    """Not of parts; the best colocated one is always among them."""
    plans = list(_list_colocated(search, found))
    if search.may_disaggregate:
        if chosen is Affinity.HIGH:
            mixed_group = plans[0].placement.groups[0] if plans else None
            plans += _list_high_affinity(search, found, mixed_group)
        else:
            plans += list_low_affinity(search, found)
    return plans


def _list_colocated(search: SearchContext, found: Sequence[Candidate]) -> Iterator[PlacementOption]:
    """For each GPU type the colocated plan that needs least resources, the smallest plan first; if
    the nodes have room for none, the one that serves most."""
    problem, step = search.problem, replace(search, step="colocated plans")
    kinds = group_by_gpu(found).values()
    smallest = [
        placement
        for of_kind in kinds
        for placement in list_smallest(step, colocated.list_instances(problem, of_kind), 1)
    ]
    for placement in sorted(smallest, key=search.get_resources):
        yield PlacementOption(placement, COLOCATED, True)
    if smallest:
        return
    rated = [each for of_kind in kinds if (each := colocated.optimize(step, of_kind)) is not None]
    if rated:
        largest = max(
            rated, key=lambda each: count_copies(problem, each.placement) * each.goodput.rate
        )
        groups, rates = largest.placement.groups, [largest.goodput.rate]
        filled = replication.fill_gpus(search, groups, rates)
        if filled is not None:
            yield PlacementOption(filled, COLOCATED, False)


def _list_high_affinity(
    search: SearchContext, found: Sequence[Candidate], mixed_group: InstanceGroup | None
) -> Iterator[PlacementOption]:
    """Disaggregated plans of any pair; if the nodes have room for none, the one that serves most.
    `mixed_group`: a mixed instance that may replace one prefill and one decode instance."""
    step = replace(search, step="prefill and decode instances")
    units = high_affinity.list_units(step, found)
    smallest = list_smallest(step, units, _MAX_DISAGGREGATED)
    if smallest and mixed_group is not None:
        smallest[0] = _exchange_for_mixed(step, smallest[0], mixed_group)
    yield from (PlacementOption(placement, HIGH, True) for placement in smallest)
    if smallest:
        return
    pairs = high_affinity.list_pairs(search.problem, high_affinity.optimize(step, found))
    if pairs:
        best = max(pairs, key=lambda pair: _estimate_rate_of_all_gpus(search, pair))
        filled = replication.fill_gpus(search, *_get_groups_and_goodputs(best))
        if filled is not None:
            yield PlacementOption(filled, HIGH, False)


def _exchange_for_mixed(
    search: SearchContext, placement: CandidatePlacement, mixed_group: InstanceGroup
) -> CandidatePlacement:
    """With mixed instances instead of a prefill and a decode instance each, while that takes less
    and holds."""
    both, one = (Role.PREFILL, Role.DECODE), replace(mixed_group, replicas=1)
    while all(placement.count_replicas(role) > 1 for role in both):
        other = placement.change_replicas(dict.fromkeys(both, -1)).add_group(one)
        takes_less = search.get_resources(other) < search.get_resources(placement)
        if not (takes_less and has_room(search.problem, other) and holds(search, other)):
            break
        placement = other
    return placement


def _estimate_rate_of_all_gpus(search: SearchContext, pair: Pair) -> float:
    """The rate that all GPUs filled with a pair's instances serve, by their goodput; 0: no room."""
    groups, goodputs = _get_groups_and_goodputs(pair)
    filled = replication.fill_by_ratio(search.problem, groups, goodputs)
    if filled is None:
        return 0.0
    served = (g.replicas * each for g, each in zip(filled.groups, goodputs, strict=True))
    return filled.copies * min(served)


def _get_groups_and_goodputs(pair: Pair) -> tuple[list[InstanceGroup], list[float]]:
    groups = [group for rated in pair for group in rated.placement.groups]
    return groups, [rated.goodput.rate for rated in pair]


def list_low_affinity(
    search: SearchContext, found: Sequence[Candidate]
) -> Iterator[PlacementOption]:
    """Plans of equal cells; if the nodes have room for none, as many of the most efficient cell as
    there are nodes for."""
    problem, step = search.problem, replace(search, step="prefill and decode in one node")
    cells = low_affinity.list_configurations(problem, found, UNLIMITED)
    smallest = list_smallest(step, cells, _MAX_DISAGGREGATED)
    yield from (PlacementOption(placement, LOW, True) for placement in smallest)
    if not smallest and (efficient := low_affinity.optimize(step, found)) is not None:
        num_cells = count_copies(problem, efficient.placement)
        yield PlacementOption(efficient.placement.with_copies(num_cells), LOW, False)
