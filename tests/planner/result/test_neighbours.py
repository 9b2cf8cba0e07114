"""What one instance more or less would do."""

import pytest

from cleave.api.role import Role
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, PlannedPool, Prediction
from cleave.planner.result.neighbours import list_neighbours
from cleave.planner.result.text import format_plan

from tests.support.emulated_chat import chat

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


@pytest.fixture
def problem():
    return chat(planning={"maxGPUs": 4})


def plan(*counts: tuple[Role, int], algorithm: str = "Algorithm 1") -> Plan:
    pools = tuple(PlannedPool(role, replicas) for role, replicas in counts)
    return Plan(pools, _SEEN, algorithm, 1.0)


def labels(found) -> list[str]:
    return [format_plan(each).replace(" tp1", "") for each in found]


def test_each_role_gets_one_more_and_one_less_where_there_is_room(problem) -> None:
    base = plan((Role.PREFILL, 2), (Role.DECODE, 1))
    assert labels(list_neighbours(problem, [base], [base])) == ["1P + 1D", "3P + 1D", "2P + 2D"]
    full = plan((Role.MIXED, 4))
    assert labels(list_neighbours(problem, [full], [full])) == ["3M"]


def test_where_instances_stay_together_whole_cells_come_and_go(problem) -> None:
    cells = plan((Role.PREFILL, 1), (Role.DECODE, 1), algorithm="Algorithm 2")
    assert labels(list_neighbours(problem, [cells], [cells])) == ["2P + 2D"]


def test_no_plan_is_found_twice(problem) -> None:
    pair, more = (
        plan((Role.PREFILL, 1), (Role.DECODE, 1)),
        plan((Role.PREFILL, 2), (Role.DECODE, 1)),
    )
    found = labels(list_neighbours(problem, [pair, more], [pair, more]))
    assert len(found) == len(set(found))


def test_more_instances_have_more_goodput(problem) -> None:
    base = plan((Role.MIXED, 2))
    one, three = list_neighbours(problem, [base], [base])
    assert (one.gpus, three.gpus) == (1, 3)
    assert one.prediction.goodput < three.prediction.goodput
