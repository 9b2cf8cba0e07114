"""Which change counts, and which windows speak of the traffic now."""

from views import NOW_S, traffic

from cleave.api.workload import Lengths, Workload
from cleave.controller.loop.drift import find_change, list_recent
from cleave.traffic.change import Quantity

PLANNED_FOR = Workload(
    rate=4, prompt_tokens=Lengths(mean=300, p90=400), output_tokens=Lengths(mean=30, p90=40)
)
DOUBLED = traffic(4, 600, NOW_S - 300) + traffic(8, 300)


def test_twice_the_rate_is_a_change_and_the_same_is_none() -> None:
    change = find_change(PLANNED_FOR, DOUBLED, NOW_S - 900)
    assert change is not None
    assert change.what is Quantity.RATE
    assert NOW_S - 330 < change.since_s < change.at_s < NOW_S - 200
    assert find_change(PLANNED_FOR, traffic(4, 600), NOW_S - 900) is None


def test_before_the_fleet_settles_nothing_is_compared() -> None:
    assert find_change(PLANNED_FOR, DOUBLED, None) is None
    assert find_change(PLANNED_FOR, DOUBLED, NOW_S - 10) is None


def test_nothing_is_compared_with_traffic_that_nobody_stated() -> None:
    assert find_change(None, DOUBLED, NOW_S - 900) is None


def test_recent_is_as_long_as_it_has_to_be() -> None:
    assert sum(each.length_s for each in list_recent(DOUBLED, NOW_S - 900, 120)) == 120
    assert sum(each.length_s for each in list_recent(DOUBLED, NOW_S - 60, 120)) == 60
    # 200 requests take longer than that to come.
    slow = traffic(1, 900)
    assert 150 <= sum(each.length_s for each in list_recent(slow, 0, 30)) <= 300
    assert list_recent((), 0, 30) == ()
