"""Replicas for a rate: enough, and not one too many."""

from dataclasses import replace

import pytest

from cleave.api.planning import Planning
from cleave.api.role import Parallelism, Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, packing, replication
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.fitting import ReplicaFitter
from cleave.planner.search.trials import CONFIRMATION_PRECISION

from tests.support import known_problems, wide_problems


def pair(problem: Problem, n: int, m: int) -> CandidatePlacement:
    candidate = known_problems.of_size(problem)
    return known_problems.split(problem, candidate, n, candidate, m)


def holds(search: SearchContext, draft: CandidatePlacement) -> bool:
    return ReplicaFitter(search).holds(draft)


@pytest.mark.parametrize("start", [(1, 1), (3, 3), (8, 2), (2, 8)])
def test_a_fitted_plan_holds_the_rate_and_no_smaller_neighbour_does(start: tuple[int, int]) -> None:
    problem = known_problems.problem(known_problems.chat(rate=25.0))
    search = known_problems.search(problem)
    fitted = replication.fit_replicas(search, pair(problem, *start))
    assert fitted is not None
    assert holds(search, fitted)
    for role in (Role.PREFILL, Role.DECODE):
        assert not holds(search, fitted.change_replicas({role: -1}))


def test_where_replicas_start_hardly_matters() -> None:
    problem = known_problems.problem(known_problems.chat(rate=25.0))
    search = known_problems.search(problem)
    sizes = set()
    for start in ((1, 1), (6, 6), (9, 2)):
        fitted = replication.fit_replicas(search, pair(problem, *start))
        assert fitted is not None
        sizes.add(fitted.gpus)
    assert max(sizes) - min(sizes) <= 1


def test_a_rate_beyond_the_inventory_has_no_fit() -> None:
    problem = known_problems.problem(known_problems.chat(rate=60.0), planning=Planning(max_gpus=4))
    search = known_problems.search(problem)
    assert replication.fit_replicas(search, pair(problem, 1, 1)) is None
    assert replication.fit_replicas(search, pair(problem, 5, 5)) is None


def test_a_large_plan_has_no_instance_that_the_rate_is_held_without() -> None:
    # In alike cells of about CELL_GPUS the counts would be multiples of three.
    problem = known_problems.problem(
        known_problems.chat(rate=400.0), supplies=(known_problems.nodes(16),)
    )
    search = known_problems.search(problem)
    fitted = replication.fit_replicas(search, pair(problem, 30, 60))
    assert fitted is not None
    assert fitted.copies == 1
    assert packing.has_room(problem, fitted)
    long = search.with_precision(CONFIRMATION_PRECISION)
    assert holds(long, fitted)
    for role in (Role.PREFILL, Role.DECODE):
        assert not holds(long, fitted.change_replicas({role: -1}))


def test_a_load_that_cells_have_no_room_for_is_fitted_whole() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=150.0),
        supplies=(known_problems.nodes(16),),
        planning=Planning(max_gpus=49),
    )
    search = known_problems.search(problem)
    start = pair(problem, 25, 24)
    assert not packing.has_room(problem, replication.divide_into_cells(start))
    fitted = replication.fit_replicas(search, start)
    assert fitted is not None
    assert fitted.gpus < 49


def test_a_phase_that_is_far_too_small_grows_and_the_other_does_not() -> None:
    # With the queue for prompts endless, no request is in time however many instances decode.
    problem = known_problems.problem(
        known_problems.chat(rate=60.0), supplies=(known_problems.nodes(8),)
    )
    search = known_problems.search(problem)
    grown = ReplicaFitter(search).grow(pair(problem, 1, 12))
    assert grown is not None
    assert grown.count_replicas(Role.DECODE) <= 14


def test_cells_in_nodes_that_are_full_become_more() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=12.0), supplies=(known_problems.nodes(4, gpus_per_node=2),)
    )
    search = known_problems.search(problem)
    cell = replace(pair(problem, 1, 1), is_in_node=True)
    held = replication.confirm_fit(search, cell)
    assert held is not None
    assert held.copies > 1
    assert held.groups == cell.groups


def test_one_dispatcher_over_all_cells_serves_no_worse_than_one_cell_alone() -> None:
    problem = known_problems.problem()
    search = known_problems.search(problem)
    alone = search.measure_shares(pair(problem, 2, 3), 15.0)
    together = search.measure_shares(pair(problem, 8, 12), 60.0)
    assert together.both >= alone.both - 0.02


def test_mixed_instances_stand_in_where_that_takes_less() -> None:
    # Colocated instances serve this workload better than split ones.
    problem = known_problems.problem(known_problems.chat(rate=25.0))
    search = known_problems.search(problem)
    spare = known_problems.whole(problem, known_problems.of_size(problem)).groups[0]
    start = pair(problem, 4, 5)
    apart = replication.fit_replicas(search, start)
    together = replication.fit_replicas(search, start, spare)
    assert apart is not None
    assert together is not None
    assert together.gpus <= apart.gpus
    assert holds(search, together)


def test_all_gpus_are_filled_in_the_ratio_that_serves_most() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(1),))
    search = known_problems.search(problem)
    filled = replication.fill_gpus(search, pair(problem, 1, 1).groups, [5.0, 5.0])
    assert filled is not None
    assert filled.gpus == 8
    rates = {
        n: goodput.find_goodput(
            search.trials, build_cell(problem, pair(problem, n, 8 - n)), search.targets
        ).rate
        for n in range(1, 8)
    }
    assert rates[filled.count_replicas(Role.PREFILL)] == max(rates.values())


def test_a_cell_too_large_for_the_nodes_is_not_filled() -> None:
    problem = known_problems.problem(planning=Planning(max_gpus=1))
    one = known_problems.problem()
    groups = pair(one, 1, 1).groups
    assert replication.fill_gpus(known_problems.search(problem), groups, [5.0, 5.0]) is None


def test_whole_cells_are_the_rate_by_the_goodput_rounded_up() -> None:
    problem = known_problems.problem()
    cell = pair(problem, 1, 1)
    copies = replication.replicate_cell(problem, cell, 3.0)
    assert copies is not None
    assert copies.copies == 4
    exact = replication.replicate_cell(problem, cell, 2.5)
    assert exact is not None
    assert exact.copies == 4
    most = replication.replicate_cell(problem, cell, 0.1)
    assert most is not None
    assert most.gpus == problem.max_gpus
    none = replace(problem, planning=Planning(max_gpus=1))
    assert replication.replicate_cell(none, cell, 0.1) is None


def test_a_cell_has_room_for_an_instance_of_each_role() -> None:
    problem = wide_problems.deepseek(nodes=16)
    small, large = (
        next(each for each in list_candidates(problem) if each.parallelism == size)
        for size in (Parallelism(data=16, expert=True), Parallelism(data=64, expert=True))
    )
    whole = known_problems.split(problem, small, 4, large, 1)
    cell = replication.divide_into_cells(whole)
    assert (cell.copies, cell.gpus) == (2, 2 * (2 * 16 + 64))
    one = known_problems.split(problem, small, 1, large, 1)
    assert replication.divide_into_cells(one).copies == 1
