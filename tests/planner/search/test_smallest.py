"""The smallest placements: no other takes less, equals have no more goodput."""

import itertools
from dataclasses import replace

import pytest

from cleave.api.planning import Objective, Planning
from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import colocated, high_affinity, low_affinity, packing
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.long_trials import holds
from cleave.planner.search.low_affinity import UNLIMITED
from cleave.planner.search.smallest import list_smallest
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets

from tests.support import known_problems, random_problems


def pair(problem: Problem, n: int, m: int) -> CandidatePlacement:
    candidate = known_problems.of_size(problem)
    return known_problems.split(problem, candidate, n, candidate, m)


def fit(problem: Problem, unit: CandidatePlacement) -> CandidatePlacement | None:
    return next(iter(list_smallest(known_problems.search(problem), [unit], 1)), None)


def test_a_fitted_plan_holds_the_rate_and_no_smaller_neighbour_does() -> None:
    problem = known_problems.problem(known_problems.chat(rate=25.0))
    search = known_problems.search(problem)
    fitted = fit(problem, pair(problem, 1, 1))
    assert fitted is not None
    assert holds(search, fitted)
    for role in (Role.PREFILL, Role.DECODE):
        assert not holds(search, fitted.change_replicas({role: -1}))


def test_what_most_samples_refute_is_left_for_the_next_larger_one() -> None:
    """Five instances are short of memory: with some limits 99.7 % are in time in the search's own
    sample, and 73 % in the mean of others."""
    few_gpus = random_problems.draw_problem(8)
    demand = few_gpus.demand.with_rate(8 * few_gpus.rate)
    problem = replace(few_gpus, demand=demand, supplies=(known_problems.nodes(4),))
    fitted = fit(problem, known_problems.whole(problem, known_problems.of_size(problem)))
    assert fitted is not None
    assert fitted.gpus == 6


def test_a_rate_beyond_the_inventory_has_no_fit() -> None:
    problem = known_problems.problem(known_problems.chat(rate=60.0), planning=Planning(max_gpus=4))
    assert fit(problem, pair(problem, 1, 1)) is None


def test_a_large_plan_has_no_instance_that_the_rate_is_held_without() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=150.0), supplies=(known_problems.nodes(16),)
    )
    fitted = fit(problem, pair(problem, 1, 1))
    assert fitted is not None
    assert packing.has_room(problem, fitted)
    for role in (Role.PREFILL, Role.DECODE):
        smaller = fitted.change_replicas({role: -1})
        assert not holds(known_problems.search(problem), smaller)


@pytest.mark.parametrize(
    ("rate", "objective"), [(6.0, Objective.GOODPUT_PER_GPU), (14.0, Objective.COST)]
)
def test_of_all_pairs_of_sizes_and_numbers_the_smallest_is_found(
    rate: float, objective: Objective
) -> None:
    problem = known_problems.problem(
        known_problems.chat(rate),
        supplies=(known_problems.nodes(1), known_problems.nodes(1, gpu="H100")),
        kinds=(("H100", known_problems.Kind(0.5, 0.6, price_per_hour=3.0)),),
        planning=Planning(objective=objective),
    )
    search = known_problems.search(problem)
    units = list(high_affinity.list_units(search, list_candidates(problem)))
    (found, *_) = list_smallest(search, units, 1)
    taken = search.get_resources(found)
    smaller = [
        placement
        for unit in units
        for counts in itertools.product(range(1, 9), repeat=2)
        if search.get_resources(
            placement := unit.change_replicas(
                {g.role: n - 1 for g, n in zip(unit.groups, counts, strict=True)}
            )
        )
        < taken * (1 - 1e-6)
        and packing.has_room(problem, placement)
    ]
    assert not any(holds(search, placement) for placement in smaller)


def test_at_a_low_rate_the_smallest_cell_and_one_small_instance_are_enough() -> None:
    problem = known_problems.problem(known_problems.chat(rate=1.0))
    search, found = known_problems.search(problem), list_candidates(problem)
    cells = low_affinity.list_configurations(problem, found, UNLIMITED)
    assert list_smallest(search, cells, 1)[0].gpus == 2
    assert list_smallest(search, colocated.list_instances(problem, found), 1)[0].gpus == 1


def test_cells_in_nodes_that_are_full_become_more() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=12.0), supplies=(known_problems.nodes(4, gpus_per_node=2),)
    )
    one = [known_problems.of_size(problem)]
    cells = low_affinity.list_configurations(problem, one, UNLIMITED)
    (found,) = list_smallest(known_problems.search(problem), cells, 1)
    assert found.copies > 1
    assert found.gpus == 2 * found.copies


def test_a_placement_that_almost_holds_is_noted() -> None:
    problem = known_problems.problem(known_problems.chat(rate=10.0))
    unit = pair(problem, 2, 2)
    search = known_problems.search(problem)
    long = search.with_precision(CONFIRMATION_PRECISION)
    share = long.measure_shares(unit, 10.0).both
    close, far = (
        known_problems.search(problem, Targets(200, 100, share + missed))
        for missed in (0.005, 0.02)
    )
    assert not holds(close, unit)
    assert not holds(far, unit)
    assert [miss.placement for miss in close.close_calls] == [unit]
    assert far.close_calls == []
