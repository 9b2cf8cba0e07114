"""How many nodes an instance takes, and which cells new instances belong to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.role import Parallelism, Role
from cleave.manifests.topology import (
    CLIQUE,
    NodeTopology,
    assign_cells,
    count_cells_per_node,
    count_nodes,
)
from cleave.planner.plan import PlannedPool

H100 = "NVIDIA-H100-80GB-HBM3"


def pool(tensor: int, pipeline: int = 1, per_cell: int | None = None, role=Role.DECODE):
    size = Parallelism(tensor=tensor, pipeline=pipeline)
    return PlannedPool(role, per_cell or 1, size, H100, per_cell=per_cell)


def nodes(one, *others, room: int = 8, **machines) -> int:
    return count_nodes(one, (one, *others), NodeTopology({H100: room}, **machines))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expected_nodes"),
    [
        (8, 1, 1),
        (8, 2, 2),
        (4, 2, 1),
        (4, 3, 3),  # two stages on one node and one on another would be different shares
        (4, 4, 2),
        (16, 1, 2),
        (12, 1, 2),
        (2, 7, 7),  # seven stages are shared alike by one or seven
    ],
)
def test_an_instance_takes_the_fewest_nodes_that_share_it_alike(
    tensor, pipeline, expected_nodes
) -> None:
    assert nodes(pool(tensor, pipeline)) == expected_nodes


@pytest.mark.parametrize(
    ("data", "tensor", "room", "expected_nodes"),
    [
        (8, 1, 8, 1),
        (16, 1, 8, 2),
        (12, 1, 8, 2),
        (6, 2, 8, 2),  # three ranks on each, as on two nodes all have equally many
        (8, 4, 8, 4),
        (2, 16, 8, 2),  # a rank that no node has GPUs for is refused elsewhere
        (32, 1, 64, 2),  # a pod has ports for sixteen
        (32, 1, None, 2),
        (16, 1, None, 1),
    ],
)
def test_data_parallel_ranks_take_the_fewest_nodes_with_equally_many(
    data, tensor, room, expected_nodes
) -> None:
    ranks = PlannedPool(Role.MIXED, 1, Parallelism(tensor=tensor, data=data), H100)
    known = NodeTopology({H100: room}) if room else NodeTopology()
    assert count_nodes(ranks, (ranks,), known) == expected_nodes


def test_nothing_is_spread_where_nothing_is_known_of_nodes() -> None:
    alone = pool(64)
    assert count_nodes(alone, (alone,), NodeTopology()) == 1
    assert count_nodes(alone, (alone,), NodeTopology({"NVIDIA-L4": 1})) == 1


def test_an_instance_without_a_kind_counts_on_the_largest_node() -> None:
    anywhere = PlannedPool(Role.MIXED, 1, Parallelism(tensor=8))
    assert count_nodes(anywhere, (anywhere,), NodeTopology({"NVIDIA-L4": 1, H100: 8})) == 1


def test_kinds_go_by_any_of_their_names() -> None:
    named = PlannedPool(Role.MIXED, 1, Parallelism(tensor=8), "H100")
    assert count_nodes(named, (named,), NodeTopology({H100: 4})) == 2


def test_instances_of_a_cell_are_cut_where_the_others_are() -> None:
    # One stage of both takes 2 * 2 + 4 of a node's 8 GPUs, so each of the two has its own node;
    # alone, either would fit one.
    prefill, decode = pool(2, 2, per_cell=2, role=Role.PREFILL), pool(4, 2, per_cell=1)
    assert nodes(prefill, decode) == nodes(decode, prefill) == 2
    assert nodes(decode, prefill, room=16) == 1


def test_a_cell_in_a_clique_is_not_bound_to_a_node() -> None:
    prefill, decode = pool(4, per_cell=2, role=Role.PREFILL), pool(4, per_cell=3)
    assert nodes(prefill, decode, room=4, domain=CLIQUE) == 1


def test_as_many_cells_as_fit_a_node_are_grouped() -> None:
    prefill, decode = pool(1, per_cell=2, role=Role.PREFILL), pool(1, per_cell=1)
    assert count_cells_per_node((prefill, decode), NodeTopology({H100: 8})) == 2
    assert count_cells_per_node((prefill, decode), NodeTopology({H100: 2})) == 1
    # One stage of both takes 4 of 8: both stages of a cell lie in one node, which is then full.
    staged = pool(2, 2, per_cell=1, role=Role.PREFILL), pool(2, 2, per_cell=1)
    assert count_cells_per_node(staged, NodeTopology({H100: 8})) == 1


def test_where_a_cell_ends_is_not_known_of_cliques_unknown_nodes_and_plans_without() -> None:
    both = pool(1, per_cell=1, role=Role.PREFILL), pool(1, per_cell=1)
    assert count_cells_per_node(both, NodeTopology({H100: 8}, CLIQUE)) is None
    assert count_cells_per_node(both, NodeTopology()) is None
    assert count_cells_per_node((pool(1),), NodeTopology({H100: 8})) is None


@given(tensor=st.integers(1, 64), pipeline=st.integers(1, 64), room=st.integers(1, 16))
def test_every_node_gets_equally_many_ranks_and_no_more_than_it_has(tensor, pipeline, room) -> None:
    occupied = nodes(pool(tensor, pipeline), room=room)
    ranks, rest = divmod(tensor * pipeline, occupied)
    assert rest == 0
    assert ranks <= room
    assert ranks % tensor == 0 or tensor % ranks == 0


@pytest.mark.parametrize(
    ("occupied", "expected", "found"),
    [
        ([], 3, [0, 0, 1]),
        ([0, 0, 1, 1], 1, [2]),
        ([0, 1, 1], 2, [0, 2]),
        ([1, 1], 2, [0, 0]),
        ([0, 0, 0], 1, [1]),  # more than belong there, while a template changes
        ([5], 0, []),
    ],
)
def test_new_instances_fill_the_first_cells_that_lack_one(occupied, expected, found) -> None:
    assert assign_cells(occupied, 2, expected) == found


@given(
    occupied=st.lists(st.integers(0, 20), max_size=30),
    per_cell=st.integers(1, 4),
    expected=st.integers(0, 30),
)
def test_no_cell_gets_more_than_belong_there(occupied, per_cell, expected) -> None:
    found = assign_cells(occupied, per_cell, expected)
    assert len(found) == expected
    for cell in found:
        assert [*occupied, *found].count(cell) <= per_cell
