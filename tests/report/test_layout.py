"""Which GPU of which node does what."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.api.role import Parallelism, Role
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, PlannedPool, Prediction
from cleave.report.layout import LayoutNode, NodeShape, lay_out
from cleave.report.node_drawing import describe_node, draw_nodes

_ZERO = Percentiles(0, 0, 0)
_SEEN = Prediction(
    1.0,
    (1.0, 1.0),
    1.0,
    _ZERO,
    _ZERO,
    _ZERO,
    0.0,
    0.0,
    Confidence(LatencySource.MEASURED, "by hand", None),
)


def plan(*pools: PlannedPool, algorithm: str = "Algorithm 1") -> Plan:
    return Plan(pools, _SEEN, algorithm, 1.0)


def pool(role: Role, replicas: int, tensor: int, pipeline: int, gpu: str | None = None):
    return PlannedPool(role, replicas, Parallelism(tensor=tensor, pipeline=pipeline), gpu)


sizes = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 6), sizes, st.integers(1, 4), st.integers(1, 6), sizes)
def test_every_gpu_is_placed_once_and_no_node_is_overfull(p, tensor, stages, d, other) -> None:
    laid_out_plan = plan(pool(Role.PREFILL, p, tensor, stages), pool(Role.DECODE, d, other, 1))
    nodes = lay_out(laid_out_plan, (NodeShape("X", 64, 8),))
    assert sum(segment.gpus for node in nodes for segment in node.segments) == laid_out_plan.gpus
    assert all(node.free >= 0 for node in nodes)
    names = [(s.role, s.instance, s.stage) for node in nodes for s in node.segments]
    assert len(set(names)) == len(names) == p * stages + d


def test_under_algorithm_2_the_same_stage_of_both_phases_shares_a_node() -> None:
    laid_out_plan = plan(
        pool(Role.PREFILL, 2, 4, 2), pool(Role.DECODE, 2, 2, 2), algorithm="Algorithm 2"
    )
    nodes = lay_out(laid_out_plan, (NodeShape("X", 4, 8),))
    assert len(nodes) == 4
    for node in nodes:
        assert [s.role for s in node.segments] == [Role.PREFILL, Role.DECODE]
        assert len({(s.instance, s.stage) for s in node.segments}) == 1


def test_pools_go_to_the_kind_of_gpu_they_were_planned_for() -> None:
    laid_out_plan = plan(pool(Role.PREFILL, 1, 2, 1, "H100"), pool(Role.DECODE, 1, 2, 1, "A100"))
    nodes = lay_out(laid_out_plan, (NodeShape("A100", 1, 8), NodeShape("H100", 1, 8)))
    assert [(node.gpu, node.segments[0].role) for node in nodes] == [
        ("A100", Role.DECODE),
        ("H100", Role.PREFILL),
    ]


def test_what_finds_no_room_is_left_out() -> None:
    nodes = lay_out(plan(pool(Role.MIXED, 3, 8, 1)), (NodeShape("X", 2, 8),))
    assert [segment.instance for node in nodes for segment in node.segments] == [0, 1]


def test_a_node_is_described_in_words() -> None:
    (node,) = lay_out(plan(pool(Role.MIXED, 1, 2, 1)), (NodeShape("X", 1, 4),))
    assert describe_node(node) == "mixed 0 (stage 0) on 2 GPUs; 2 free"


def test_ranks_of_an_instance_are_drawn_one_by_one() -> None:
    wide = PlannedPool(Role.DECODE, 1, Parallelism(tensor=2, data=6, expert=True))
    first, second = lay_out(plan(wide), (NodeShape("X", 2, 8),))
    assert [segment.stage for segment in first.segments] == [0, 1, 2, 3]
    assert describe_node(second).startswith("decode 0 (rank 4) on 2 GPUs; decode 0 (rank 5)")
    assert ">r5</text>" in draw_nodes((first, second))


def test_of_many_nodes_the_first_are_drawn_and_the_others_counted() -> None:
    nodes = lay_out(plan(pool(Role.MIXED, 40, 8, 1)), (NodeShape("X", 40, 8),))
    drawn = draw_nodes(nodes)
    assert drawn.count("<svg") == 32
    assert "8 more nodes" in drawn


def test_names_cannot_break_out_of_the_drawing() -> None:
    assert "<script" not in draw_nodes((LayoutNode("<script>", 1, ()),))
