"""Drafts: what they take, the fleet they stand for, the way of their KV."""

import pytest

from cleave.api.planning import Objective
from cleave.api.role import Role
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.perf.hardware.link import Link, LinkKind
from cleave.planner.search import candidate_placement as drafts
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup

from tests.support import known_problems


def pair(problem, n=1, m=1, **kinds) -> CandidatePlacement:
    first = known_problems.of_size(problem, 2)
    second = known_problems.of_size(problem, 1)
    return known_problems.split(problem, first, n, second, m)


def test_a_draft_takes_gpus_money_and_power_of_all_its_cells() -> None:
    draft = pair(known_problems.problem(), 3, 2).with_copies(5)
    assert draft.gpus == 5 * (3 * 2 + 2)
    assert draft.get_resources(Objective.COST) == 2.0 * draft.gpus
    assert draft.get_resources(Objective.POWER) == 400.0 * draft.gpus
    assert draft.get_resources(Objective.GOODPUT_PER_GPU) == draft.gpus


def test_instances_are_added_removed_and_joined_in_the_order_of_roles() -> None:
    problem = known_problems.problem()
    draft = pair(problem, 2, 1)
    mixed = known_problems.whole(problem, known_problems.of_size(problem)).groups[0]
    joined = draft.add_group(mixed).add_group(mixed)
    assert [(g.role, g.replicas) for g in joined.groups] == [
        (Role.PREFILL, 2),
        (Role.DECODE, 1),
        (Role.MIXED, 2),
    ]
    assert not draft.change_replicas({Role.PREFILL: -2}).is_disaggregated


def test_the_fleet_is_one_cell_and_the_pools_are_all_of_them() -> None:
    problem = known_problems.problem()
    draft = pair(problem, 2, 1).with_copies(3)
    fleet = drafts.build_cell(problem, draft)
    assert [pool.replicas for pool in (*fleet.prefill, *fleet.decode)] == [2, 1]
    pools = drafts.to_planned_pools(draft)
    assert [(pool.role, pool.replicas) for pool in pools] == [(Role.PREFILL, 6), (Role.DECODE, 3)]
    assert pools[0].batching == "PREFILL_FIRST"
    assert pools[0].max_num_batched_tokens == 512
    assert drafts.describe(draft) == "6 prefill (TP 2) + 3 decode (TP 1)"


def test_pools_of_algorithm_2_contain_which_instances_share_a_node() -> None:
    problem = known_problems.problem()
    groups = (
        *pair(problem, 2, 1).groups,
        *known_problems.whole(problem, known_problems.of_size(problem)).groups,
    )
    cells = drafts.to_planned_pools(CandidatePlacement(groups, copies=3, is_in_node=True))
    assert [(pool.role, pool.replicas, pool.per_cell) for pool in cells] == [
        (Role.PREFILL, 6, 2),
        (Role.DECODE, 3, 1),
        (Role.MIXED, 3, None),
    ]
    anywhere = drafts.to_planned_pools(CandidatePlacement(groups, copies=3))
    assert [pool.per_cell for pool in anywhere] == [None, None, None]


def test_kv_stays_on_the_nodes_links_when_one_node_holds_the_plan_or_algorithm_2_says_so() -> None:
    problem = known_problems.problem(
        supplies=(known_problems.nodes(4, network=known_problems.SLOW_NETWORK),)
    )
    small, large = pair(problem), pair(problem, 6, 6)
    assert drafts.select_link(small) == known_problems.NVLINK
    assert drafts.select_link(large) == known_problems.SLOW_NETWORK
    assert (
        drafts.select_link(CandidatePlacement(large.groups, is_in_node=True))
        == known_problems.NVLINK
    )
    alone = known_problems.problem(supplies=(known_problems.nodes(1, gpus_per_node=64),))
    assert drafts.select_link(pair(alone, 6, 6)) == known_problems.NVLINK


def test_between_different_nodes_the_slower_network_counts() -> None:
    fast = Link(LinkKind.INFINIBAND, 50.0)
    problem = known_problems.problem(
        supplies=(known_problems.nodes(2), known_problems.nodes(2, gpu="H100", network=fast)),
    )
    first, second = problem.supplies
    found = {
        each.supply: each for each in known_problems.list_candidates(problem) if each.gpus == 1
    }
    draft = known_problems.split(problem, found[second], 1, found[first], 1)
    assert drafts.select_link(draft).gb_per_s == known_problems.INFINIBAND.gb_per_s


def test_a_hand_off_takes_as_long_as_its_kv_over_the_links_of_the_smaller_side() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(4),))
    draft = pair(problem, 6, 6)
    moved = drafts.build_transfer(problem, draft)
    # OPT-13B: 2 * 40 layers * 5,120 * 2 bytes per token, through one decode GPU.
    bytes_per_ms = known_problems.INFINIBAND.effective_gb_per_s * 1e6
    assert moved.token_ms == pytest.approx(819_200 / bytes_per_ms)
    assert moved.latency_ms == known_problems.INFINIBAND.start_ms


def test_the_rate_of_a_gpu_is_that_of_the_transfer() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(4),))
    sizes = {each.gpus: each for each in known_problems.list_candidates(problem)}
    for prefill, decode in ((1, 1), (2, 1), (1, 2)):
        draft = known_problems.split(problem, sizes[prefill], 6, sizes[decode], 6)
        link, moved = drafts.build_kv_link(draft), drafts.build_transfer(problem, draft)
        assert link is not None
        gpu_bytes = problem.shape.compute_kv_bytes_on_gpu(decode, 1)
        assert moved.token_ms == pytest.approx(gpu_bytes / (link.gb_per_s * 1e6))


def test_mixed_instances_move_nothing() -> None:
    problem = known_problems.problem()
    draft = known_problems.whole(problem, known_problems.of_size(problem), 3)
    assert drafts.build_transfer(problem, draft).token_ms == 0
    assert drafts.build_kv_link(draft) is None
    group = draft.groups[0]
    assert (
        draft.add_group(InstanceGroup(Role.MIXED, group.instance, 2)).count_replicas(Role.MIXED)
        == 5
    )


def test_prompts_gain_by_a_transfer_per_layer_from_a_power_of_two_of_tokens_on() -> None:
    problem = known_problems.problem()
    draft = pair(problem)
    found = drafts.compute_ahead_from_tokens(problem, draft)
    assert found.bit_count() == 1
    prefill = draft.groups[0].instance.engine.timing
    moved = build_kv_transfer(
        problem.shape,
        drafts.select_link(draft),
        (2, 1),
        (1, 1),
        prefill.predict_prefill_ms([2048]) / 2048,
    )
    assert moved.compute_per_layer_ms(found) < moved.compute_serialized_ms(found)
    assert moved.compute_per_layer_ms(found // 4) > moved.compute_serialized_ms(found // 4)
    assert (
        drafts.compute_ahead_from_tokens(
            problem, known_problems.whole(problem, known_problems.of_size(problem))
        )
        == 0
    )
