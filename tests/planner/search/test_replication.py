"""Placements on all GPUs, and equal cells."""

from itertools import pairwise

from cleave.api.planning import Planning
from cleave.api.role import Parallelism, Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, replication
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.candidates import list_candidates

from tests.support import known_problems, wide_problems


def pair(problem: Problem, n: int, m: int) -> CandidatePlacement:
    candidate = known_problems.of_size(problem)
    return known_problems.split(problem, candidate, n, candidate, m)


def test_one_dispatcher_over_all_cells_serves_no_worse_than_one_cell_alone() -> None:
    problem = known_problems.problem()
    search = known_problems.search(problem)
    alone = search.measure_shares(pair(problem, 2, 3), 15.0)
    together = search.measure_shares(pair(problem, 8, 12), 60.0)
    assert together.both >= alone.both - 0.02


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


def test_parts_of_a_higher_rate_are_whole_numbers_of_those_of_a_lower_one() -> None:
    nodes = (known_problems.nodes(200),)
    problems = [
        known_problems.problem(known_problems.chat(rate), supplies=nodes)
        for rate in (100.0, 1500.0, 2500.0, 3300.0, 5200.0, 9000.0)
    ]
    parts = [
        replication.count_parts(known_problems.search(each), list_candidates(each))
        for each in problems
    ]
    assert all(more % fewer == 0 for fewer, more in pairwise(parts))
    assert parts[0] == 1
    assert parts[-1] > 4
