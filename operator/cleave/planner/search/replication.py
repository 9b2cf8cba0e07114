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
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, packing
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.fitting import ReplicaFitter
from cleave.planner.search.trials import CONFIRMATION_PRECISION

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this many GPUs."""
_MAX_EXCHANGES = 64


def fit_replicas(
    search: SearchContext, placement: CandidatePlacement, mixed_group: InstanceGroup | None = None
) -> CandidatePlacement | None:
    """The smallest plan close to `placement` that serves the rate; None: the nodes have no room.
    `mixed_group` is a mixed instance that may replace one prefill and one decode instance."""
    if placement.is_in_node:
        return _grow_and_shrink(ReplicaFitter(search), placement, mixed_group)
    start = divide_into_cells(placement)
    cell = _grow_and_shrink(ReplicaFitter(search), start, mixed_group)
    if start.copies == 1:
        return cell
    # Equal cells round every count up, so try to remove instances of the complete fleet. Its trials
    # are long in any case, and `confirm_fit` would have to restore what short ones removed.
    fitter = ReplicaFitter(search.with_precision(CONFIRMATION_PRECISION))
    return _grow_and_shrink(fitter, merge_cells(cell) if cell else placement, mixed_group)


def confirm_fit(search: SearchContext, placement: CandidatePlacement) -> CandidatePlacement | None:
    """`placement` with the instances added that trials show to be missing; None: no room."""
    fitter = ReplicaFitter(search)
    return placement if fitter.holds(placement) else _grow_and_shrink(fitter, placement)


def replicate_cell(
    problem: Problem, cell: CandidatePlacement, served: float
) -> CandidatePlacement | None:
    """Complete cells for the rate, n = ceil(R / goodput), as Algorithm 2 replicates, or as many as
    the nodes have room for: behind one dispatcher fewer may be enough. None: no room for one.
    `served` is the goodput of one cell."""
    needed = math.ceil(problem.rate / served * (1 - 1e-9))
    copies = packing.count_copies(problem, cell, needed)
    return cell.with_copies(copies) if copies else None


def fill_gpus(
    search: SearchContext, groups: Sequence[InstanceGroup], goodputs: Sequence[float]
) -> CandidatePlacement | None:
    """The plan that serves the highest rate on all GPUs, where they are too few for the requested
    one.

    It consists of cells, filled in the ratio of what one instance of each group serves
    (`goodputs`), then improved by exchanging roles. None: not even one instance of each group fits.
    """
    cell = fill_by_ratio(search.problem, groups, goodputs)
    if cell is None:
        return None
    cell = _exchange_roles(search, cell.with_copies(1))
    return cell.with_copies(packing.count_copies(search.problem, cell))


def fill_by_ratio(
    problem: Problem, groups: Sequence[InstanceGroup], goodputs: Sequence[float]
) -> CandidatePlacement | None:
    """The same without a simulation."""
    unit = CandidatePlacement(tuple(replace(group, replicas=1) for group in groups))
    if not packing.has_room(problem, unit):
        return None
    max_gpus = problem.max_gpus // math.ceil(problem.max_gpus / CELL_GPUS)
    cell = _fill_cell(problem, unit, goodputs, max(max_gpus, unit.gpus))
    return cell.with_copies(packing.count_copies(problem, cell))


def merge_cells(placement: CandidatePlacement) -> CandidatePlacement:
    """All cells merged into one, behind one dispatcher."""
    return CandidatePlacement(
        tuple(replace(g, replicas=g.replicas * placement.copies) for g in placement.groups)
    )


def divide_into_cells(placement: CandidatePlacement) -> CandidatePlacement:
    """Divide a large plan into cells of about CELL_GPUS, rounded up; a small one stays one cell. A
    cell has room for an instance of each role."""
    smallest = sum(group.instance.candidate.gpus for group in placement.groups)
    cells = max(1, round(placement.gpus / max(CELL_GPUS, smallest)))
    groups = tuple(replace(g, replicas=math.ceil(g.replicas / cells)) for g in placement.groups)
    return CandidatePlacement(groups, cells, placement.is_in_node)


def _grow_and_shrink(
    fitter: ReplicaFitter, start: CandidatePlacement, mixed_group: InstanceGroup | None = None
) -> CandidatePlacement | None:
    grown = fitter.grow(start)
    return fitter.shrink(grown, mixed_group) if grown else None


def _fill_cell(
    problem: Problem, unit: CandidatePlacement, goodputs: Sequence[float], limit: int
) -> CandidatePlacement:
    placement = unit
    while True:
        served = [g.replicas * each for g, each in zip(placement.groups, goodputs, strict=True)]
        weakest = sorted(range(len(served)), key=served.__getitem__)
        grown = (placement.change_replicas({placement.groups[index].role: 1}) for index in weakest)
        options = (each for each in grown if each.gpus <= limit and packing.has_room(problem, each))
        larger = next(options, None)
        if larger is None:
            return placement
        placement = larger


def _exchange_roles(search: SearchContext, placement: CandidatePlacement) -> CandidatePlacement:
    """Exchange prefill and decode instances while the cell serves more."""
    problem, trials, targets = search.problem, search.trials, search.targets
    served = goodput.find_goodput(trials, build_cell(problem, placement), targets).rate
    for _ in range(_MAX_EXCHANGES):
        for more, less in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if placement.count_replicas(less) < 2:
                continue
            exchanged = placement.change_replicas({more: 1, less: -1})
            if exchanged.gpus > placement.gpus or not packing.has_room(problem, exchanged):
                continue
            fleet = build_cell(problem, exchanged)
            rate = goodput.find_goodput(trials, fleet, targets, at_least=served).rate
            if rate > served:
                placement, served = exchanged, rate
                break
        else:
            return placement
    return placement
