"""Placements of each algorithm that serve the requested rate, for the search to predict and rank.

Called by `plan_search.plan`. An algorithm that yields no placement found none: no instance meets
its targets, or the nodes have no room for as many as the rate needs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cleave.api.planning import Affinity
from cleave.planner.plan import LOW_AFFINITY
from cleave.planner.search import colocated, high_affinity, low_affinity, ranking, replication
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import Candidate, group_by_gpu
from cleave.planner.search.context import SearchContext
from cleave.planner.search.high_affinity import BestPhases, Pair
from cleave.planner.search.packing import count_copies, has_room
from cleave.planner.search.trials import CONFIRMATION_PRECISION

HIGH, LOW, COLOCATED = "Algorithm 1", LOW_AFFINITY, "colocated"
_MAX_PAIRS = 3
"""Pairs of instances (GPU type, size) whose replicas are fitted; others need more resources."""
MAX_RESOURCE_RATIO = 1.5
"""A further disaggregated plan that needs more than this many times the first one is not listed."""
_MANY_INSTANCES = 8
"""From this many instances on, a smaller instance size would save too little to search for it."""


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """A placement and whether it serves the rate; if not, it uses all GPUs of the nodes."""

    placement: CandidatePlacement
    algorithm: str
    holds_rate: bool


def enumerate_placements(
    search: SearchContext, found: Sequence[Candidate], affinity: Affinity
) -> list[PlacementOption]:
    """Placements of all requested algorithms; the best colocated one is always among them."""
    plans = list(_list_colocated(search, found))
    if search.may_disaggregate:
        if affinity is Affinity.HIGH:
            mixed_group = plans[0].placement.groups[0] if plans else None
            plans += _list_high_affinity(search, found, mixed_group)
        else:
            plans += list_low_affinity(search, found)
    return plans


def _list_colocated(search: SearchContext, found: Sequence[Candidate]) -> Iterator[PlacementOption]:
    """For each GPU type the colocated plan that needs least resources, the smallest plan first.

    GPU types are fitted one by one: many instances behind one dispatcher need fewer replicas than
    their separate goodput suggests, and how many fewer depends on the type.
    """
    problem, step = search.problem, replace(search, step="colocated plans")
    kinds = group_by_gpu(found).values()
    rated = [colocated.optimize(step, of_kind, ranking.find_smallest) for of_kind in kinds]
    smallest_per_gpu = [each for each in rated if each is not None]
    fitted: list[CandidatePlacement] = []
    for each in smallest_per_gpu:
        search.tick("replicas of the colocated plan")
        start = replication.replicate_cell(problem, each.placement, each.goodput.rate)
        if start is not None:
            fit = _fit(search, replication.merge_cells(start))
            fitted += [fit] if fit else []
    if fitted:
        ordered = sorted(fitted, key=search.get_resources)
        yield from (PlacementOption(placement, COLOCATED, True) for placement in ordered)
    elif smallest_per_gpu:
        largest = max(
            smallest_per_gpu,
            key=lambda each: count_copies(problem, each.placement) * each.goodput.rate,
        )
        groups, rates = largest.placement.groups, [largest.goodput.rate]
        filled = replication.fill_gpus(search, groups, rates)
        if filled is not None:
            yield PlacementOption(filled, COLOCATED, False)


def _list_high_affinity(
    search: SearchContext, found: Sequence[Candidate], mixed_group: InstanceGroup | None
) -> Iterator[PlacementOption]:
    """Fitted disaggregated plans; if the nodes have room for none, the one that serves most."""
    problem = search.problem
    pairs = [
        (high_affinity.replicate(*pair, problem.rate), pair)
        for pair in high_affinity.list_pairs(problem, _find_phases(search, found))
    ]
    pairs.sort(key=lambda item: search.get_resources(item[0]))
    fitted: list[CandidatePlacement] = []
    for replicated, pair in pairs[:_MAX_PAIRS]:
        search.tick("replicas of prefill and decode instances")
        taken = min(map(search.get_resources, fitted), default=math.inf)
        if search.get_resources(replicated) > MAX_RESOURCE_RATIO * taken:
            break
        start = (
            replicated
            if has_room(problem, replicated)
            else replication.fill_gpus(search, *_get_groups_and_goodputs(pair))
        )
        best = _fit(search, start, mixed_group) if start else None
        if best is not None:
            fitted.append(best)
    yield from (PlacementOption(placement, HIGH, True) for placement in _drop_duplicates(fitted))
    if pairs and not fitted:
        _, best_pair = max(pairs, key=lambda item: _estimate_rate_of_all_gpus(search, item[1]))
        filled = replication.fill_gpus(search, *_get_groups_and_goodputs(best_pair))
        if filled is not None:
            yield PlacementOption(filled, HIGH, False)


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


def _find_phases(search: SearchContext, found: Sequence[Candidate]) -> tuple[BestPhases, ...]:
    """Algorithm 1's phases; while replicas are few, also those that need least for this rate."""
    step = replace(search, step="prefill and decode instances")
    efficient = high_affinity.optimize(step, found)
    rated = [option for phases in efficient for option in (phases.prefill, phases.decode) if option]
    if all(search.problem.rate > _MANY_INSTANCES * option.goodput.rate for option in rated):
        return efficient
    return efficient + high_affinity.optimize(step, found, ranking.find_smallest)


def list_low_affinity(
    search: SearchContext, found: Sequence[Candidate]
) -> Iterator[PlacementOption]:
    """The most efficient cell; while cells are few, also the one that needs least resources."""
    problem, step = search.problem, replace(search, step="prefill and decode in one node")
    efficient = low_affinity.optimize(step, found)
    if efficient is None:
        return
    cells = [efficient]
    if problem.rate <= _MANY_INSTANCES * efficient.goodput.rate:
        smallest = low_affinity.optimize(step, found, ranking.find_smallest)
        cells += [smallest] if smallest else []
    fitted: list[CandidatePlacement] = []
    for cell in cells:
        search.tick("replicas of prefill and decode in one node")
        replicated = replication.replicate_cell(problem, cell.placement, cell.goodput.rate)
        best = _fit(search, replicated) if replicated else None
        if best is not None:
            fitted.append(best)
    yield from (PlacementOption(placement, LOW, True) for placement in _drop_duplicates(fitted))
    if not fitted:
        num_cells = count_copies(problem, efficient.placement)
        yield PlacementOption(efficient.placement.with_copies(num_cells), LOW, False)


def _drop_duplicates(placements: Sequence[CandidatePlacement]) -> list[CandidatePlacement]:
    """Without placements that differ only in step limits or in the division into cells."""
    shapes = {
        tuple((g.role, g.instance.candidate, g.replicas * each.copies) for g in each.groups): each
        for each in reversed(placements)
    }
    return list(reversed(shapes.values()))


def _fit(
    search: SearchContext, start: CandidatePlacement, mixed_group: InstanceGroup | None = None
) -> CandidatePlacement | None:
    """Remove replicas in short trials, then confirm the result in long ones."""
    fitted = replication.fit_replicas(search, start, mixed_group)
    if fitted is None:
        return None
    return replication.confirm_fit(search.with_precision(CONFIRMATION_PRECISION), fitted)
