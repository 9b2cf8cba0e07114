"""What is enumerated: Algorithm 1's loops."""

import pytest

from cleave.api.planning import Objective, Planning
from cleave.api.role import Parallelism
from cleave.planner.problem import Policies, Problem
from cleave.planner.search.candidates import (
    build_decode,
    build_mixed,
    build_prefill,
    list_candidates,
    list_sizes,
)
from cleave.simulator.fleet import Batching

from tests.support import known_problems, wide_problems


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


def expert_sizes(problem: Problem) -> set[tuple[int, int]]:
    found = list_sizes(problem, problem.supplies[0])
    return {(each.tensor, each.data) for each in found if each.expert}


def test_experts_are_shared_evenly_by_ranks_within_a_node_or_over_whole_nodes() -> None:
    found = expert_sizes(wide_problems.deepseek(nodes=12))
    assert {tensor * data for tensor, data in found} == {2, 4, 8, 16, 32, 64}
    assert {(1, 64), (4, 16), (8, 1)} <= found
    assert (16, 1) not in found
    # Three nodes have 24 GPUs, which do not divide 256 experts.
    assert {tensor * data for tensor, data in expert_sizes(wide_problems.deepseek(nodes=3))} == {
        *(2, 4, 8, 16)
    }


def test_a_pod_has_at_most_sixteen_ranks_and_an_instance_64() -> None:
    large = expert_sizes(wide_problems.deepseek(nodes=4, gpusPerNode=64))
    assert {tensor for tensor, data in large if tensor * data == 64} == {4, 8, 16, 32, 64}
    many = expert_sizes(wide_problems.deepseek(nodes=32))
    assert max(data for _, data in many) == 64
    assert (2, 64) in many


def test_a_model_without_experts_has_no_ranks() -> None:
    dense = wide_problems.deepseek(model="meta-llama/Llama-3.1-70B-Instruct", args=())
    assert not expert_sizes(dense)
    assert {each.parallelism.data for each in list_candidates(dense)} == {1}


def test_an_engine_of_ranks_has_the_memory_of_one_and_the_price_of_all() -> None:
    problem = wide_problems.deepseek()
    size = Parallelism(data=8, expert=True)
    (wide,) = (each for each in list_candidates(problem) if each.parallelism == size)
    assert build_decode(problem, wide).engine.ranks == 8
    assert wide.gpus == 8
    one_gpu = problem.estimator.machines[wide.supply.gpu].gpu
    assert wide.estimate.cost_per_hour == pytest.approx(8 * one_gpu.price_per_hour)
    # With tensor parallelism every GPU keeps the latents of all tokens.
    (sliced,) = (
        each for each in list_candidates(problem) if each.parallelism == Parallelism(tensor=8)
    )
    assert 8 * wide.estimate.kv_capacity_tokens > 4 * sliced.estimate.kv_capacity_tokens
