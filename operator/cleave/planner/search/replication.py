"""Placements of as many instances as the nodes have room for, and their division into equal cells.

Called where the nodes cannot serve the rate, and for the nearest SLO. What is hard: cost. Above
CELL_GPUS equal cells are filled, and one of them is simulated at its share of the rate.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, packing
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_mixed
from cleave.planner.search.capacity_bound import estimate_rate
from cleave.planner.search.context import SearchContext

CELL_GPUS = 32
"""Larger plans are simulated in cells of about this many GPUs."""
PART_GPUS = 128
"""Problems of twice as many are divided into parts of this many to twice as many."""
_MAX_EXCHANGES = 64


def count_parts(search: SearchContext, found: Sequence[Candidate]) -> int:
    """Number of equal parts of the nodes, of which one is searched for all: a thousand instances
    behind one dispatcher take minutes. A power of two, so that two parts of a higher rate are one
    of a lower one, which then takes no more in spite of rounding."""
    problem, lengths = search.problem, search.trials.get_lengths()
    batching = problem.policies.mixed[0]
    singles = (
        CandidatePlacement((InstanceGroup(Role.MIXED, build_mixed(problem, each, batching), 1),))
        for each in found
    )
    per_gpu = max(
        estimate_rate(build_cell(problem, each), lengths, search.targets.tpot_ms) / each.gpus
        for each in singles
    )
    gpus = min(problem.rate / per_gpu, problem.max_gpus)
    most = min(int(gpus / PART_GPUS), *(each.num_nodes for each in problem.supplies))
    return 1 << max(most.bit_length() - 1, 0)


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
