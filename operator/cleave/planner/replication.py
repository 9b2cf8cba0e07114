"""How many instances of each role serve a rate: the fewest whose simulation, as a whole, holds it.

DistServe replicates each phase by its own goodput (section 4.1). Many queues behind one dispatcher
serve more than as many queues apart, and one phase delays the other; from the replicas that the
phases suggest, instances are therefore added, taken away and exchanged as long as the fleet holds
the rate with less. What is hard: cost. Above CELL_GPUS the plan is made of alike cells and one cell
is simulated at its share of the rate, so that 1,024 GPUs take no longer than 32.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.api.role import Role
from cleave.planner import goodput, packing
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.problem import Problem
from cleave.planner.trials import Shares, Targets, Trials

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this size."""
_MOST_MOVES = 64
_GROWTH = 0.05
"""Part of a role's instances that one step adds."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a fleet has to hold."""

    rate: float
    targets: Targets


def fit(
    problem: Problem, trials: Trials, draft: Draft, load: Load, spare: Group | None = None
) -> Draft | None:
    """The smallest plan near `draft` that holds the load; None: the nodes have no room for one.

    `spare` is a mixed instance that may stand in for a prefill and a decode instance.
    """
    start = draft if draft.copies > 1 else celled(draft)
    share = Load(load.rate / start.copies, load.targets)
    grown = _grow(problem, trials, start, share)
    return _shrink(problem, trials, grown, share, spare) if grown else None


def hold(problem: Problem, trials: Trials, draft: Draft, load: Load) -> Draft | None:
    """`draft`, with as many more instances as `trials` ask for; None: no room."""
    return _grow(problem, trials, draft, Load(load.rate / draft.copies, load.targets))


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


def celled(draft: Draft) -> Draft:
    """A large plan as cells of about CELL_GPUS, rounded up; a small one is one cell."""
    cells = max(1, round(draft.gpus / CELL_GPUS))
    groups = (Group(g.role, g.instance, math.ceil(g.replicas / cells)) for g in draft.groups)
    return Draft(tuple(groups), cells, draft.is_in_node)


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


def shares(problem: Problem, trials: Trials, draft: Draft, load: Load) -> Shares:
    """Of one cell at its share of the rate (`load` is a cell's)."""
    span = trials.span(load.rate, load.targets)
    return trials.shares(cell_fleet(problem, draft), load.rate, load.targets, span)


def _holds(problem: Problem, trials: Trials, draft: Draft, load: Load) -> bool:
    return shares(problem, trials, draft, load).both >= load.targets.attainment


def _grow(problem: Problem, trials: Trials, draft: Draft, load: Load) -> Draft | None:
    """Add to the role whose growth helps most until the load is held."""
    if not packing.fits(problem, draft):
        return None
    for _ in range(_MOST_MOVES):
        if _holds(problem, trials, draft, load):
            return draft
        tried = [
            (shares(problem, trials, grown, load).both, -grown.gpus, number, grown)
            for number, grown in enumerate(_grown(draft))
            if packing.fits(problem, grown)
        ]
        if not tried:
            return None
        draft = max(tried)[3]
    return None


def _grown(draft: Draft) -> Iterator[Draft]:
    for group in draft.groups:
        yield draft.changed({group.role: max(1, round(group.replicas * _GROWTH))})


def _shrink(
    problem: Problem, trials: Trials, draft: Draft, load: Load, spare: Group | None
) -> Draft:
    """Take the move that saves most and still holds, until there is none."""
    for _ in range(_MOST_MOVES):
        smaller = next(
            (
                each
                for each in _smaller(problem, draft, spare)
                if _holds(problem, trials, each, load)
            ),
            None,
        )
        if smaller is None:
            return draft
        draft = smaller
    return draft


def _smaller(problem: Problem, draft: Draft, spare: Group | None) -> list[Draft]:
    """Drafts that take less, the least first."""
    objective = problem.planning.objective
    moves = [
        draft.changed(changes)
        for changes in (
            {Role.PREFILL: -1, Role.DECODE: -1},
            {Role.PREFILL: -1},
            {Role.DECODE: -1},
            {Role.MIXED: -1},
            {Role.PREFILL: -1, Role.DECODE: 1},
            {Role.PREFILL: 1, Role.DECODE: -1},
        )
        if all(draft.replicas(role) for role in changes)
    ]
    if spare is not None and draft.replicas(Role.PREFILL) > 1 and draft.replicas(Role.DECODE) > 1:
        moves.append(draft.changed({Role.PREFILL: -1, Role.DECODE: -1}).joined(spare))
    limit = draft.resources(objective)
    able = [
        each
        for each in moves
        if _is_whole(each) and each.resources(objective) < limit and packing.fits(problem, each)
    ]
    return sorted(able, key=lambda each: each.resources(objective))


def _is_whole(draft: Draft) -> bool:
    """Whether both phases have instances of their own, or all instances are mixed."""
    both = draft.replicas(Role.PREFILL) > 0 and draft.replicas(Role.DECODE) > 0
    return both or (bool(draft.groups) and all(g.role is Role.MIXED for g in draft.groups))
