"""How many instances of each role serve a rate: the fewest whose simulation, as a whole, holds it.

DistServe replicates each phase by its own goodput (section 4.1). Many queues behind one dispatcher
serve more than as many queues apart, and one phase delays the other; from the replicas that the
phases suggest, instances are therefore added, taken away and exchanged as long as the fleet holds
the rate with less. What is hard: cost. Above CELL_GPUS alike cells are fitted
first, each simulated at its share of the rate; only what their counts were rounded up by is then
taken away in simulations of all instances.
"""

import math
from collections.abc import Sequence

from cleave.api.role import Role
from cleave.planner import goodput, packing
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.fitting import Fitting, Load
from cleave.planner.problem import Problem
from cleave.planner.trials import CONFIRMED, Targets, Trials

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this size."""
_MOST_MOVES = 64


def fit(
    problem: Problem, trials: Trials, draft: Draft, load: Load, spare: Group | None = None
) -> Draft | None:
    """The smallest plan near `draft` that holds the load; None: the nodes have no room for one.

    `spare` is a mixed instance that may stand in for a prefill and a decode instance.
    """
    if draft.is_in_node:
        return _fitted(Fitting(problem, trials, load), draft, spare)
    start = celled(draft)
    cell = _fitted(Fitting(problem, trials, load), start, spare)
    if start.copies == 1:
        return cell
    # Alike cells round every count up; the fleet as a whole says which of them it needs. Its trials
    # are long in any case, and what short ones save `hold` would have to give back.
    whole = Fitting(problem, trials.at(CONFIRMED), load)
    return _fitted(whole, merged(cell) if cell else draft, spare)


def hold(problem: Problem, trials: Trials, draft: Draft, load: Load) -> Draft | None:
    """`draft`, with as many more instances as `trials` ask for; None: no room."""
    fitting = Fitting(problem, trials, load)
    if fitting.holds(draft):
        return draft
    grown = fitting.grown(draft)
    return fitting.shrunk(grown) if grown else None


def copies(problem: Problem, cell: Draft, served: float, rate: float) -> Draft | None:
    """Whole cells for a rate: n = ceil(R / goodput), as Algorithm 2 replicates; None: no room.

    `served` is the goodput of one cell.
    """
    wanted = cell.copied(math.ceil(rate / served * (1 - 1e-9)))
    return wanted if packing.fits(problem, wanted) else None


def fill(
    problem: Problem,
    trials: Trials,
    groups: Sequence[Group],
    goodputs: Sequence[float],
    targets: Targets,
) -> Draft | None:
    """The plan that serves most on all GPUs there are, where they are too few for the rate.

    In cells, filled in the ratio of what one instance of each group serves (`goodputs`), then
    exchanged while that serves more. None: not even one of each fits.
    """
    cell = filled(problem, groups, goodputs)
    if cell is None:
        return None
    cell = _climbed(problem, trials, cell.copied(1), targets)
    return cell.copied(packing.most_copies(problem, cell))


def filled(problem: Problem, groups: Sequence[Group], goodputs: Sequence[float]) -> Draft | None:
    """The same without a simulation."""
    one = Draft(tuple(Group(group.role, group.instance, 1) for group in groups))
    if not packing.fits(problem, one):
        return None
    most = problem.max_gpus // math.ceil(problem.max_gpus / CELL_GPUS)
    cell = _filled(problem, one, goodputs, max(most, one.gpus))
    return cell.copied(packing.most_copies(problem, cell))


def merged(draft: Draft) -> Draft:
    """Its cells as one of all their instances, behind one dispatcher."""
    groups = (Group(g.role, g.instance, g.replicas * draft.copies) for g in draft.groups)
    return Draft(tuple(groups))


def celled(draft: Draft) -> Draft:
    """A large plan as cells of about CELL_GPUS, rounded up; a small one is one cell."""
    cells = max(1, round(draft.gpus / CELL_GPUS))
    groups = (Group(g.role, g.instance, math.ceil(g.replicas / cells)) for g in draft.groups)
    return Draft(tuple(groups), cells, draft.is_in_node)


def _fitted(fitting: Fitting, start: Draft, spare: Group | None) -> Draft | None:
    grown = fitting.grown(start)
    return fitting.shrunk(grown, spare) if grown else None


def _filled(problem: Problem, one: Draft, goodputs: Sequence[float], most: int) -> Draft:
    draft = one
    while True:
        served = [group.replicas * each for group, each in zip(draft.groups, goodputs, strict=True)]
        weakest = sorted(range(len(served)), key=served.__getitem__)
        grown = (draft.changed({draft.groups[place].role: 1}) for place in weakest)
        able = (each for each in grown if each.gpus <= most and packing.fits(problem, each))
        larger = next(able, None)
        if larger is None:
            return draft
        draft = larger


def _climbed(problem: Problem, trials: Trials, draft: Draft, targets: Targets) -> Draft:
    """Exchange prefill and decode instances while the cell serves more."""
    served = goodput.find(trials, cell_fleet(problem, draft), targets).rate
    for _ in range(_MOST_MOVES):
        for more, less in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if draft.replicas(less) < 2:
                continue
            exchanged = draft.changed({more: 1, less: -1})
            if exchanged.gpus > draft.gpus or not packing.fits(problem, exchanged):
                continue
            fleet = cell_fleet(problem, exchanged)
            found = goodput.find(trials, fleet, targets, at_least=served).rate
            if found > served:
                draft, served = exchanged, found
                break
        else:
            return draft
    return draft
