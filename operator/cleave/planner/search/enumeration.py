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
from cleave.planner.search.candidate_placement import Draft, Group, weight_in
from cleave.planner.search.candidates import Candidate
from cleave.planner.search.fitting import Load
from cleave.planner.search.high_affinity import Phases
from cleave.planner.search.ranking import Rated
from cleave.planner.search.trials import CONFIRMED, Targets, Trials

HIGH, LOW, COLOCATED = "Algorithm 1", "Algorithm 2", "colocated"
_MOST_PAIRS = 3
"""Pairs of instances (GPU type and size) whose replicas are fitted; the others need more
resources."""
WORTH_SHOWING = 1.5
"""A further disaggregated plan that needs more than this many times the first one is not listed."""
_MANY = 8
"""From this many instances on, a smaller instance size would save too little to search for it."""

Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A placement and whether it serves the rate; if not, it uses all GPUs of the nodes."""

    draft: Draft
    algorithm: str
    is_enough: bool


def drafts(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    affinity: Affinity,
    tick: Tick,
) -> list[Found]:
    """Placements of all requested algorithms; the best colocated one is always among them."""
    plans = list(_colocated(problem, trials, found, targets, tick))
    if problem.planning.disaggregation is not Disaggregation.NEVER:
        if affinity is Affinity.HIGH:
            mixed_group = plans[0].draft.groups[0] if plans else None
            plans += _high(problem, trials, found, targets, mixed_group, tick)
        else:
            plans += _low(problem, trials, found, targets, tick)
    return plans


def _colocated(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    tick: Tick,
) -> Iterator[Found]:
    """For each GPU type the colocated plan that needs least resources, the smallest plan first.

    GPU types are fitted one by one: many instances behind one dispatcher need fewer replicas than
    their separate goodput suggests, and how many fewer depends on the type.
    """

    def step() -> None:
        tick("colocated plans")

    kinds = candidates.by_gpu(found).values()
    rated = [colocated.fewest(problem, trials, of_kind, targets, step) for of_kind in kinds]
    smallest_per_gpu = [each for each in rated if each is not None]
    fitted: list[Draft] = []
    for each in smallest_per_gpu:
        tick("replicas of the colocated plan")
        start = replication.copies(problem, each.draft, each.goodput.rate, problem.rate)
        if start is not None:
            load = Load(problem.rate, targets)
            fit = _fitted(problem, trials, replication.merged(start), load)
            fitted += [fit] if fit else []
    if fitted:
        ordered = sorted(fitted, key=weight_in(problem))
        yield from (Found(placement, COLOCATED, True) for placement in ordered)
    elif smallest_per_gpu:
        largest = max(smallest_per_gpu, key=lambda option: _served_by_copies(problem, option))
        groups, rates = largest.draft.groups, [largest.goodput.rate]
        filled = replication.fill(problem, trials, groups, rates, targets)
        if filled is not None:
            yield Found(filled, COLOCATED, False)


def _served_by_copies(problem: Problem, rated: Rated) -> float:
    return packing.most_copies(problem, rated.draft) * rated.goodput.rate


def _high(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    mixed_group: Group | None,
    tick: Tick,
) -> Iterator[Found]:
    """Fitted disaggregated plans; if the nodes have room for none, the one that uses them best."""
    load, objective = Load(problem.rate, targets), problem.planning.objective
    pairs = sorted(
        high_affinity.pairs(problem, _phases(problem, trials, found, targets, tick)),
        key=lambda pair: high_affinity.replicated(pair[0], pair[1], problem.rate).resources(
            objective
        ),
    )
    fitted: list[Draft] = []
    for pair in pairs[:_MOST_PAIRS]:
        tick("replicas of prefill and decode instances")
        replicated = high_affinity.replicated(pair[0], pair[1], problem.rate)
        taken = min((each.resources(objective) for each in fitted), default=math.inf)
        if replicated.resources(objective) > WORTH_SHOWING * taken:
            break
        start = (
            replicated
            if packing.fits(problem, replicated)
            else _all_there_is(problem, trials, pair, targets)
        )
        best = _fitted(problem, trials, start, load, mixed_group) if start else None
        if best is not None:
            fitted.append(best)
    yield from (Found(placement, HIGH, True) for placement in _distinct(fitted))
    if not fitted:
        best_pair = max(pairs, key=lambda pair: _served_by_all(problem, pair), default=None)
        filled = _all_there_is(problem, trials, best_pair, targets) if best_pair else None
        if filled is not None:
            yield Found(filled, HIGH, False)


def _served_by_all(problem: Problem, pair: tuple[Rated, Rated]) -> float:
    """The rate that all GPUs filled with a pair's instances serve, by their goodput; 0: no room."""
    groups, goodputs = _parts(pair)
    filled = replication.filled(problem, groups, goodputs)
    if filled is None:
        return 0.0
    served = (g.replicas * each for g, each in zip(filled.groups, goodputs, strict=True))
    return filled.copies * min(served)


def _all_there_is(
    problem: Problem, trials: Trials, pair: tuple[Rated, Rated], targets: Targets
) -> Draft | None:
    groups, goodputs = _parts(pair)
    return replication.fill(problem, trials, groups, goodputs, targets)


def _parts(pair: tuple[Rated, Rated]) -> tuple[list[Group], list[float]]:
    groups = [group for rated in pair for group in rated.draft.groups]
    return groups, [rated.goodput.rate for rated in pair]


def _phases(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    tick: Tick,
) -> tuple[Phases, ...]:
    """Algorithm 1's phases; while replicas are few, also those that need least for this very
    rate."""

    def step() -> None:
        tick("prefill and decode instances")

    efficient = high_affinity.optimise(problem, trials, found, targets, step)
    rated = [option for phases in efficient for option in (phases.prefill, phases.decode) if option]
    if not rated or all(problem.rate > _MANY * option.goodput.rate for option in rated):
        return efficient
    return efficient + high_affinity.fewest(problem, trials, found, targets, step)


def _low(
    problem: Problem, trials: Trials, found: Sequence[Candidate], targets: Targets, tick: Tick
) -> Iterator[Found]:
    """The most efficient cell; while cells are few, also the one that needs least resources."""

    def step() -> None:
        tick("prefill and decode in one node")

    efficient = low_affinity.optimise(problem, trials, found, targets, tick=step)
    if efficient is None:
        return
    cells = [efficient]
    if problem.rate <= _MANY * efficient.goodput.rate:
        smallest = low_affinity.fewest(problem, trials, found, targets, step)
        cells += [smallest] if smallest else []
    fitted: list[Draft] = []
    for cell in cells:
        tick("replicas of prefill and decode in one node")
        replicated = replication.copies(problem, cell.draft, cell.goodput.rate, problem.rate)
        best = (
            _fitted(problem, trials, replicated, Load(problem.rate, targets))
            if replicated
            else None
        )
        if best is not None:
            fitted.append(best)
    yield from (Found(placement, LOW, True) for placement in _distinct(fitted))
    if not fitted:
        num_cells = packing.most_copies(problem, efficient.draft)
        yield Found(efficient.draft.copied(num_cells), LOW, False)


def _distinct(placements: Sequence[Draft]) -> list[Draft]:
    """Without placements that differ only in step limits or in the division into cells."""
    shapes = {
        tuple(
            (g.role, g.instance.candidate, g.replicas * placement.copies) for g in placement.groups
        ): placement
        for placement in reversed(placements)
    }
    return list(reversed(shapes.values()))


def _fitted(
    problem: Problem, trials: Trials, start: Draft, load: Load, mixed_group: Group | None = None
) -> Draft | None:
    """Remove replicas in short trials, then confirm the result in long ones."""
    fitted = replication.fit(problem, trials, start, load, mixed_group)
    return replication.hold(problem, trials.at(CONFIRMED), fitted, load) if fitted else None
