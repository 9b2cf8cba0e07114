"""The fewest instances of each role whose simulation, as one fleet, serves a rate.

DistServe replicates each phase by its own goodput (section 4.1). Many instances behind one
dispatcher serve more than the same instances with separate queues, and one phase delays the other.
Starting with the paper's replicas, instances are therefore added, removed and exchanged as long as
the fleet serves the rate with less. What is hard: cost. Above CELL_GPUS equal cells are fitted
first, each simulated at its share of the rate; only the instances that rounding added are then
removed in simulations of the complete fleet.
"""

import math
from collections.abc import Sequence

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, packing
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell_fleet,
)
from cleave.planner.search.fitting import ReplicaFitter, TargetLoad
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this many GPUs."""
_MAX_EXCHANGES = 64


def fit_replicas(
    problem: Problem,
    trials: Trials,
    placement: CandidatePlacement,
    load: TargetLoad,
    mixed_group: InstanceGroup | None = None,
) -> CandidatePlacement | None:
    """The smallest plan close to `placement` that meets the load; None: the nodes have no room for
    one.

    `mixed_group` is a mixed instance that may replace one prefill and one decode instance.
    """
    if placement.is_in_node:
        return _grow_and_shrink(ReplicaFitter(problem, trials, load), placement, mixed_group)
    start = divide_into_cells(placement)
    cell = _grow_and_shrink(ReplicaFitter(problem, trials, load), start, mixed_group)
    if start.copies == 1:
        return cell
    # Equal cells round every count up, so try to remove instances of the complete fleet. Its trials
    # are long in any case, and `confirm_replicas` would have to restore what short ones removed.
    fitter = ReplicaFitter(problem, trials.with_precision(CONFIRMATION_PRECISION), load)
    return _grow_and_shrink(fitter, merge_cells(cell) if cell else placement, mixed_group)


def confirm_replicas(
    problem: Problem, trials: Trials, placement: CandidatePlacement, load: TargetLoad
) -> CandidatePlacement | None:
    """`placement` with the instances added that `trials` show to be missing; None: no room."""
    fitting = ReplicaFitter(problem, trials, load)
    if fitting.holds(placement):
        return placement
    grown = fitting.grow(placement)
    return fitting.shrink(grown) if grown else None


def replicate_cell(
    problem: Problem, cell: CandidatePlacement, served: float, rate: float
) -> CandidatePlacement | None:
    """Complete cells for a rate, n = ceil(R / goodput), as Algorithm 2 replicates; None: no room.

    `served` is the goodput of one cell.
    """
    replicated = cell.with_copies(math.ceil(rate / served * (1 - 1e-9)))
    return replicated if packing.has_room(problem, replicated) else None


def fill_gpus(
    problem: Problem,
    trials: Trials,
    groups: Sequence[InstanceGroup],
    goodputs: Sequence[float],
    targets: Targets,
) -> CandidatePlacement | None:
    """The plan that serves the highest rate on all GPUs, where they are too few for the requested
    one.

    It consists of cells, filled in the ratio of what one instance of each group serves
    (`goodputs`), then improved by exchanging roles. None: not even one instance of each group fits.
    """
    cell = fill_by_ratio(problem, groups, goodputs)
    if cell is None:
        return None
    cell = _exchange_roles(problem, trials, cell.with_copies(1), targets)
    return cell.with_copies(packing.count_copies(problem, cell))


def fill_by_ratio(
    problem: Problem, groups: Sequence[InstanceGroup], goodputs: Sequence[float]
) -> CandidatePlacement | None:
    """The same without a simulation."""
    unit = CandidatePlacement(
        tuple(InstanceGroup(group.role, group.instance, 1) for group in groups)
    )
    if not packing.has_room(problem, unit):
        return None
    max_gpus = problem.max_gpus // math.ceil(problem.max_gpus / CELL_GPUS)
    cell = _fill_cell(problem, unit, goodputs, max(max_gpus, unit.gpus))
    return cell.with_copies(packing.count_copies(problem, cell))


def merge_cells(placement: CandidatePlacement) -> CandidatePlacement:
    """All cells merged into one, behind one dispatcher."""
    groups = (
        InstanceGroup(g.role, g.instance, g.replicas * placement.copies) for g in placement.groups
    )
    return CandidatePlacement(tuple(groups))


def divide_into_cells(placement: CandidatePlacement) -> CandidatePlacement:
    """Divide a large plan into cells of about CELL_GPUS, rounded up; a small one stays one cell."""
    cells = max(1, round(placement.gpus / CELL_GPUS))
    groups = (
        InstanceGroup(g.role, g.instance, math.ceil(g.replicas / cells)) for g in placement.groups
    )
    return CandidatePlacement(tuple(groups), cells, placement.is_in_node)


def _grow_and_shrink(
    fitting: ReplicaFitter, start: CandidatePlacement, mixed_group: InstanceGroup | None
) -> CandidatePlacement | None:
    grown = fitting.grow(start)
    return fitting.shrink(grown, mixed_group) if grown else None


def _fill_cell(
    problem: Problem, unit: CandidatePlacement, goodputs: Sequence[float], max_gpus: int
) -> CandidatePlacement:
    placement = unit
    while True:
        served = [
            group.replicas * each for group, each in zip(placement.groups, goodputs, strict=True)
        ]
        weakest = sorted(range(len(served)), key=served.__getitem__)
        grown = (placement.change_replicas({placement.groups[index].role: 1}) for index in weakest)
        feasible = (
            each for each in grown if each.gpus <= max_gpus and packing.has_room(problem, each)
        )
        larger = next(feasible, None)
        if larger is None:
            return placement
        placement = larger


def _exchange_roles(
    problem: Problem, trials: Trials, placement: CandidatePlacement, targets: Targets
) -> CandidatePlacement:
    """Exchange prefill and decode instances while the cell serves more."""
    served = goodput.find_goodput(trials, build_cell_fleet(problem, placement), targets).rate
    for _ in range(_MAX_EXCHANGES):
        for more, less in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if placement.count_replicas(less) < 2:
                continue
            exchanged = placement.change_replicas({more: 1, less: -1})
            if exchanged.gpus > placement.gpus or not packing.has_room(problem, exchanged):
                continue
            fleet = build_cell_fleet(problem, exchanged)
            rate = goodput.find_goodput(trials, fleet, targets, at_least=served).rate
            if rate > served:
                placement, served = exchanged, rate
                break
        else:
            return placement
    return placement
