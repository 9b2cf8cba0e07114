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
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet
from cleave.planner.search.fitting import Fitting, Load
from cleave.planner.search.trials import CONFIRMED, Targets, Trials

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this many GPUs."""
_MOST_MOVES = 64


def fit(
    problem: Problem, trials: Trials, placement: Draft, load: Load, mixed_group: Group | None = None
) -> Draft | None:
    """The smallest plan close to `placement` that meets the load; None: the nodes have no room for
    one.

    `mixed_group` is a mixed instance that may replace one prefill and one decode instance.
    """
    if placement.is_in_node:
        return _fitted(Fitting(problem, trials, load), placement, mixed_group)
    start = celled(placement)
    cell = _fitted(Fitting(problem, trials, load), start, mixed_group)
    if start.copies == 1:
        return cell
    # Equal cells round every count up, so try to remove instances of the complete fleet. Its trials
    # are long in any case, and `hold` would have to restore what short ones removed.
    fitter = Fitting(problem, trials.at(CONFIRMED), load)
    return _fitted(fitter, merged(cell) if cell else placement, mixed_group)


def hold(problem: Problem, trials: Trials, placement: Draft, load: Load) -> Draft | None:
    """`placement` with the instances added that `trials` show to be missing; None: no room."""
    fitting = Fitting(problem, trials, load)
    if fitting.holds(placement):
        return placement
    grown = fitting.grown(placement)
    return fitting.shrunk(grown) if grown else None


def copies(problem: Problem, cell: Draft, served: float, rate: float) -> Draft | None:
    """Complete cells for a rate, n = ceil(R / goodput), as Algorithm 2 replicates; None: no room.

    `served` is the goodput of one cell.
    """
    replicated = cell.copied(math.ceil(rate / served * (1 - 1e-9)))
    return replicated if packing.fits(problem, replicated) else None


def fill(
    problem: Problem,
    trials: Trials,
    groups: Sequence[Group],
    goodputs: Sequence[float],
    targets: Targets,
) -> Draft | None:
    """The plan that serves the highest rate on all GPUs, where they are too few for the requested
    one.

    It consists of cells, filled in the ratio of what one instance of each group serves
    (`goodputs`), then improved by exchanging roles. None: not even one instance of each group fits.
    """
    cell = filled(problem, groups, goodputs)
    if cell is None:
        return None
    cell = _climbed(problem, trials, cell.copied(1), targets)
    return cell.copied(packing.most_copies(problem, cell))


def filled(problem: Problem, groups: Sequence[Group], goodputs: Sequence[float]) -> Draft | None:
    """The same without a simulation."""
    unit = Draft(tuple(Group(group.role, group.instance, 1) for group in groups))
    if not packing.fits(problem, unit):
        return None
    max_gpus = problem.max_gpus // math.ceil(problem.max_gpus / CELL_GPUS)
    cell = _filled(problem, unit, goodputs, max(max_gpus, unit.gpus))
    return cell.copied(packing.most_copies(problem, cell))


def merged(placement: Draft) -> Draft:
    """All cells merged into one, behind one dispatcher."""
    groups = (Group(g.role, g.instance, g.replicas * placement.copies) for g in placement.groups)
    return Draft(tuple(groups))


def celled(placement: Draft) -> Draft:
    """Divide a large plan into cells of about CELL_GPUS, rounded up; a small one stays one cell."""
    cells = max(1, round(placement.gpus / CELL_GPUS))
    groups = (Group(g.role, g.instance, math.ceil(g.replicas / cells)) for g in placement.groups)
    return Draft(tuple(groups), cells, placement.is_in_node)


def _fitted(fitting: Fitting, start: Draft, mixed_group: Group | None) -> Draft | None:
    grown = fitting.grown(start)
    return fitting.shrunk(grown, mixed_group) if grown else None


def _filled(problem: Problem, unit: Draft, goodputs: Sequence[float], max_gpus: int) -> Draft:
    placement = unit
    while True:
        served = [
            group.replicas * each for group, each in zip(placement.groups, goodputs, strict=True)
        ]
        weakest = sorted(range(len(served)), key=served.__getitem__)
        grown = (placement.changed({placement.groups[index].role: 1}) for index in weakest)
        feasible = (each for each in grown if each.gpus <= max_gpus and packing.fits(problem, each))
        larger = next(feasible, None)
        if larger is None:
            return placement
        placement = larger


def _climbed(problem: Problem, trials: Trials, placement: Draft, targets: Targets) -> Draft:
    """Exchange prefill and decode instances while the cell serves more."""
    served = goodput.find(trials, cell_fleet(problem, placement), targets).rate
    for _ in range(_MOST_MOVES):
        for more, less in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if placement.replicas(less) < 2:
                continue
            exchanged = placement.changed({more: 1, less: -1})
            if exchanged.gpus > placement.gpus or not packing.fits(problem, exchanged):
                continue
            fleet = cell_fleet(problem, exchanged)
            rate = goodput.find(trials, fleet, targets, at_least=served).rate
            if rate > served:
                placement, served = exchanged, rate
                break
        else:
            return placement
    return placement
