"""Placements of each algorithm that serve the requested rate, for the search to predict and rank.

Called by `search.plan`. An algorithm that yields no placement found none: no instance meets its
targets, or the nodes have no room for as many as the rate needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cleave.api.planning import Affinity, Disaggregation
from cleave.planner.problem import Problem
from cleave.planner.search import (
    candidates,
    colocated,
    high_affinity,
    low_affinity,
    packing,
    replication,
)
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    make_resource_function,
)
from cleave.planner.search.candidates import Candidate
from cleave.planner.search.fitting import TargetLoad
from cleave.planner.search.high_affinity import BestPhases
from cleave.planner.search.ranking import RankedPlacement
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials

HIGH, LOW, COLOCATED = "Algorithm 1", "Algorithm 2", "colocated"
_MAX_PAIRS = 3
"""Pairs of instances (GPU type and size) whose replicas are fitted; the others need more
resources."""
MAX_RESOURCE_RATIO = 1.5
"""A further disaggregated plan that needs more than this many times the first one is not listed."""
_MANY_INSTANCES = 8
"""From this many instances on, a smaller instance size would save too little to search for it."""

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """A placement and whether it serves the rate; if not, it uses all GPUs of the nodes."""

    placement: CandidatePlacement
    algorithm: str
    holds_rate: bool


def enumerate_placements(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    affinity: Affinity,
    tick: Tick,
) -> list[PlacementOption]:
    """Placements of all requested algorithms; the best colocated one is always among them."""
    plans = list(_list_colocated(problem, trials, found, targets, tick))
    if problem.planning.disaggregation is not Disaggregation.NEVER:
        if affinity is Affinity.HIGH:
            mixed_group = plans[0].placement.groups[0] if plans else None
            plans += _list_high_affinity(problem, trials, found, targets, mixed_group, tick)
        else:
            plans += _list_low_affinity(problem, trials, found, targets, tick)
    return plans


def _list_colocated(
    problem: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets, tick: Tick
) -> Iterator[PlacementOption]:
    """For each GPU type the colocated plan that needs least resources, the smallest plan first.

    GPU types are fitted one by one: many instances behind one dispatcher need fewer replicas than
    their separate goodput suggests, and how many fewer depends on the type.
    """

    def step() -> None:
        tick("colocated plans")

    kinds = candidates.group_by_gpu(found).values()
    rated = [colocated.find_smallest(problem, trials, of_kind, targets, step) for of_kind in kinds]
    smallest_per_gpu = [each for each in rated if each is not None]
    fitted: list[CandidatePlacement] = []
    for each in smallest_per_gpu:
        tick("replicas of the colocated plan")
        start = replication.replicate_cell(problem, each.placement, each.goodput.rate, problem.rate)
        if start is not None:
            load = TargetLoad(problem.rate, targets)
            fit = _fit(problem, trials, replication.merge_cells(start), load)
            fitted += [fit] if fit else []
    if fitted:
        ordered = sorted(fitted, key=make_resource_function(problem))
        yield from (PlacementOption(placement, COLOCATED, True) for placement in ordered)
    elif smallest_per_gpu:
        largest = max(
            smallest_per_gpu, key=lambda option: _estimate_rate_of_copies(problem, option)
        )
        groups, rates = largest.placement.groups, [largest.goodput.rate]
        filled = replication.fill_gpus(problem, trials, groups, rates, targets)
        if filled is not None:
            yield PlacementOption(filled, COLOCATED, False)


def _estimate_rate_of_copies(problem: Problem, rated: RankedPlacement) -> float:
    return packing.count_copies(problem, rated.placement) * rated.goodput.rate


def _list_high_affinity(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    mixed_group: InstanceGroup | None,
    tick: Tick,
) -> Iterator[PlacementOption]:
    """Fitted disaggregated plans; if the nodes have room for none, the one that serves most."""
    load, objective = TargetLoad(problem.rate, targets), problem.planning.objective
    pairs = sorted(
        high_affinity.list_pairs(problem, _find_phases(problem, trials, found, targets, tick)),
        key=lambda pair: high_affinity.replicate(pair[0], pair[1], problem.rate).get_resources(
            objective
        ),
    )
    fitted: list[CandidatePlacement] = []
    for pair in pairs[:_MAX_PAIRS]:
        tick("replicas of prefill and decode instances")
        replicated = high_affinity.replicate(pair[0], pair[1], problem.rate)
        taken = min((each.get_resources(objective) for each in fitted), default=math.inf)
        if replicated.get_resources(objective) > MAX_RESOURCE_RATIO * taken:
            break
        start = (
            replicated
            if packing.has_room(problem, replicated)
            else _fill_all_gpus(problem, trials, pair, targets)
        )
        best = _fit(problem, trials, start, load, mixed_group) if start else None
        if best is not None:
            fitted.append(best)
    yield from (PlacementOption(placement, HIGH, True) for placement in _drop_duplicates(fitted))
    if not fitted:
        best_pair = max(
            pairs, key=lambda pair: _estimate_rate_of_all_gpus(problem, pair), default=None
        )
        filled = _fill_all_gpus(problem, trials, best_pair, targets) if best_pair else None
        if filled is not None:
            yield PlacementOption(filled, HIGH, False)


def _estimate_rate_of_all_gpus(
    problem: Problem, pair: tuple[RankedPlacement, RankedPlacement]
) -> float:
    """The rate that all GPUs filled with a pair's instances serve, by their goodput; 0: no room."""
    groups, goodputs = _get_groups_and_goodputs(pair)
    filled = replication.fill_by_ratio(problem, groups, goodputs)
    if filled is None:
        return 0.0
    served = (g.replicas * each for g, each in zip(filled.groups, goodputs, strict=True))
    return filled.copies * min(served)


def _fill_all_gpus(
    problem: Problem,
    trials: Trials,
    pair: tuple[RankedPlacement, RankedPlacement],
    targets: Targets,
) -> CandidatePlacement | None:
    groups, goodputs = _get_groups_and_goodputs(pair)
    return replication.fill_gpus(problem, trials, groups, goodputs, targets)


def _get_groups_and_goodputs(
    pair: tuple[RankedPlacement, RankedPlacement],
) -> tuple[list[InstanceGroup], list[float]]:
    groups = [group for rated in pair for group in rated.placement.groups]
    return groups, [rated.goodput.rate for rated in pair]


def _find_phases(
    problem: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets, tick: Tick
) -> tuple[BestPhases, ...]:
    """Algorithm 1's phases; while replicas are few, also those that need least for this rate."""

    def step() -> None:
        tick("prefill and decode instances")

    efficient = high_affinity.optimize(problem, trials, found, targets, step)
    rated = [option for phases in efficient for option in (phases.prefill, phases.decode) if option]
    if not rated or all(problem.rate > _MANY_INSTANCES * option.goodput.rate for option in rated):
        return efficient
    return efficient + high_affinity.find_smallest(problem, trials, found, targets, step)


def _list_low_affinity(
    problem: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets, tick: Tick
) -> Iterator[PlacementOption]:
    """The most efficient cell; while cells are few, also the one that needs least resources."""

    def step() -> None:
        tick("prefill and decode in one node")

    efficient = low_affinity.optimize(problem, trials, found, targets, tick=step)
    if efficient is None:
        return
    cells = [efficient]
    if problem.rate <= _MANY_INSTANCES * efficient.goodput.rate:
        smallest = low_affinity.find_smallest(problem, trials, found, targets, step)
        cells += [smallest] if smallest else []
    fitted: list[CandidatePlacement] = []
    for cell in cells:
        tick("replicas of prefill and decode in one node")
        replicated = replication.replicate_cell(
            problem, cell.placement, cell.goodput.rate, problem.rate
        )
        best = (
            _fit(problem, trials, replicated, TargetLoad(problem.rate, targets))
            if replicated
            else None
        )
        if best is not None:
            fitted.append(best)
    yield from (PlacementOption(placement, LOW, True) for placement in _drop_duplicates(fitted))
    if not fitted:
        num_cells = packing.count_copies(problem, efficient.placement)
        yield PlacementOption(efficient.placement.with_copies(num_cells), LOW, False)


def _drop_duplicates(placements: Sequence[CandidatePlacement]) -> list[CandidatePlacement]:
    """Without placements that differ only in step limits or in the division into cells."""
    shapes = {
        tuple(
            (g.role, g.instance.candidate, g.replicas * placement.copies) for g in placement.groups
        ): placement
        for placement in reversed(placements)
    }
    return list(reversed(shapes.values()))


def _fit(
    problem: Problem,
    trials: Trials,
    start: CandidatePlacement,
    load: TargetLoad,
    mixed_group: InstanceGroup | None = None,
) -> CandidatePlacement | None:
    """Remove replicas in short trials, then confirm the result in long ones."""
    fitted = replication.fit_replicas(problem, trials, start, load, mixed_group)
    return (
        replication.confirm_replicas(
            problem, trials.with_precision(CONFIRMATION_PRECISION), fitted, load
        )
        if fitted
        else None
    )
