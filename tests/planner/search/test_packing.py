"""Room on nodes: tensor parallel groups stay together."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cleave.api.planning import Planning
from cleave.api.role import Parallelism, Role
from cleave.planner.search import packing
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import build_decode, list_candidates

from tests.support import known_problems, wide_problems


def draft(problem, *pieces: tuple[int, int, int]) -> CandidatePlacement:
    """(tensor, pipeline, replicas) per group."""
    roles = (Role.PREFILL, Role.DECODE, Role.MIXED)
    groups = []
    for role, (tensor, pipeline, replicas) in zip(roles, pieces, strict=False):
        instance = (
            known_problems.whole(problem, known_problems.of_size(problem, tensor, pipeline))
            .groups[0]
            .instance
        )
        groups.append(InstanceGroup(role, instance, replicas))
    return CandidatePlacement(tuple(group for group in groups if group.replicas))


def test_three_groups_of_four_need_two_nodes_of_eight() -> None:
    one = known_problems.problem(supplies=(known_problems.nodes(1),))
    two = known_problems.problem(supplies=(known_problems.nodes(2),))
    assert not packing.has_room(one, draft(one, (4, 1, 3)))
    assert packing.has_room(two, draft(two, (4, 1, 3)))


def test_leftover_gpus_on_different_nodes_hold_no_tensor_parallel_group() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(2, gpus_per_node=6),))
    # 4 + 2 on each node; a third group of four would need the two halves.
    assert not packing.has_room(problem, draft(problem, (4, 1, 3)))
    assert packing.has_room(problem, draft(problem, (4, 1, 2), (2, 1, 2)))


def test_stages_of_one_instance_may_lie_on_several_nodes() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(4, gpus_per_node=4),))
    assert packing.has_room(problem, draft(problem, (4, 4, 1)))


def test_segments_of_algorithm_2_share_a_node() -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(2, gpus_per_node=4),))
    pair = draft(problem, (2, 2, 1), (2, 2, 1))
    apart = draft(problem, (4, 2, 1), (2, 2, 1))
    assert packing.has_room(problem, CandidatePlacement(pair.groups, is_in_node=True))
    assert not packing.has_room(problem, CandidatePlacement(apart.groups, is_in_node=True))


def test_limits_on_gpus_count_even_where_there_is_room() -> None:
    kind = known_problems.problem(supplies=(known_problems.nodes(4, max_gpus=6),))
    plan = known_problems.problem(planning=Planning(max_gpus=6))
    for objective_and_plan in (kind, plan):
        assert packing.has_room(objective_and_plan, draft(objective_and_plan, (2, 1, 3)))
        assert not packing.has_room(objective_and_plan, draft(objective_and_plan, (2, 1, 4)))


def test_most_copies_is_the_last_that_fits() -> None:
    problem = known_problems.problem()
    cell = draft(problem, (4, 1, 1), (2, 1, 1))
    most = packing.count_copies(problem, cell)
    assert packing.has_room(problem, cell.with_copies(most))
    assert not packing.has_room(problem, cell.with_copies(most + 1))
    assert packing.count_copies(problem, cell, limit=2) == 2
    assert packing.count_copies(known_problems.problem(planning=Planning(max_gpus=4)), cell) == 0


def can_pack(pieces: list[int], nodes: list[int]) -> bool:
    """Every way to put pieces on nodes."""
    for places in product(range(len(nodes)), repeat=len(pieces)):
        free = list(nodes)
        for piece, place in zip(pieces, places, strict=True):
            free[place] -= piece
        if min(free) >= 0:
            return True
    return False


@given(
    fours=st.integers(0, 2),
    twos=st.integers(0, 3),
    ones=st.integers(0, 2),
    per_node=st.integers(4, 6),
    num_nodes=st.integers(1, 3),
)
def test_powers_of_two_find_room_whenever_there_is_any(
    fours: int, twos: int, ones: int, per_node: int, num_nodes: int
) -> None:
    problem = known_problems.problem(
        supplies=(known_problems.nodes(num_nodes, gpus_per_node=per_node),)
    )
    counts = [(4, fours), (2, twos), (1, ones)]
    drafted = draft(problem, *((size, 1, count) for size, count in counts))
    sizes = [size for size, count in counts for _ in range(count)]
    assert packing.has_room(problem, drafted) == can_pack(sizes, [per_node] * num_nodes)


def test_ranks_over_nodes_take_whole_ones_and_others_share_theirs() -> None:
    problem = wide_problems.deepseek(nodes=4)

    def wide(data: int, replicas: int) -> CandidatePlacement:
        size = Parallelism(data=data, expert=True)
        (found,) = (each for each in list_candidates(problem) if each.parallelism == size)
        instance = build_decode(problem, found)
        return CandidatePlacement((InstanceGroup(Role.DECODE, instance, replicas),))

    assert packing.count_copies(problem, wide(16, 1)) == 2
    assert packing.count_copies(problem, wide(8, 1)) == 4
    assert packing.has_room(problem, wide(32, 1))
    assert not packing.has_room(problem, wide(32, 2))
