"""What is enumerated: Algorithm 1's loops."""

from cleave.api.planning import Objective, Planning
from cleave.planner.problem import Policies, Problem
from cleave.planner.search.candidates import (
    build_decode,
    build_mixed,
    build_prefill,
    list_candidates,
    list_sizes,
)
from cleave.simulator.fleet import Batching

from tests.support import known_problems


def sizes(problem: Problem) -> list[tuple[int, int]]:
    found = list_sizes(problem, problem.supplies[0])
    return [(each.tensor, each.pipeline) for each in found]


def test_tensor_parallel_sizes_stay_in_a_node_and_stages_cross_nodes() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(2, gpus_per_node=4),))
    found = sizes(problem)
    assert max(tensor for tensor, _ in found) == 4
    assert (4, 2) in found
    assert (4, 3) not in found
    # Three GPUs of a node hold one stage of three: no node has room for a second one.
    assert (3, 2) in found
    assert (3, 3) not in found


def test_limits_on_nodes_and_gpus_bound_an_instance() -> None:
    problem = known_problems.problem(planning=Planning(max_gpus=4))
    assert max(tensor * pipeline for tensor, pipeline in sizes(problem)) == 4
    capped = known_problems.problem(supplies=(known_problems.nodes(max_gpus=2),))
    assert set(sizes(capped)) == {(1, 1), (1, 2), (2, 1)}


def test_only_what_the_estimator_knows_is_a_candidate() -> None:
    found = list_candidates(known_problems.problem())
    assert {each.parallelism.tensor for each in found} == {1, 2, 4}
    assert {each.parallelism.pipeline for each in found} == {1, 2, 4, 5, 8}
    assert all(each.gpus <= 32 for each in found)


def test_what_a_candidate_takes_is_counted_as_the_objective_says() -> None:
    candidate = known_problems.of_size(known_problems.problem(), 2, 2)
    assert candidate.get_resources(Objective.GOODPUT_PER_GPU) == 4
    assert candidate.get_resources(Objective.COST) == 8.0
    assert candidate.get_resources(Objective.POWER) == 1600.0


def test_distserves_prefill_batches_near_saturation_and_vllms_up_to_its_budget() -> None:
    paper, today = known_problems.problem(), known_problems.problem(policies=Policies())
    candidate = known_problems.of_size(paper)
    assert build_prefill(paper, candidate).max_num_batched_tokens == 512
    assert build_prefill(today, candidate).max_num_batched_tokens == 2048
    assert build_prefill(today, candidate).batching is Batching.VLLM


def test_limits_on_requests_hold_for_every_pipeline_stage() -> None:
    problem = known_problems.problem()
    one, four = known_problems.of_size(problem, 1, 1), known_problems.of_size(problem, 1, 4)
    for seqs in (
        lambda each: build_mixed(problem, each, Batching.VLLM).max_num_seqs,
        lambda each: build_decode(problem, each).max_num_seqs,
    ):
        assert seqs(four) == 4 * seqs(one)
