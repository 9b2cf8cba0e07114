"""Which change counts, and which windows speak of the traffic now."""

from collections.abc import Sequence
from dataclasses import replace

from cleave.api.workload import LengthDistribution, Workload
from cleave.controller.replan.drift import find_current_start_s, find_settle_s, list_recent, update
from cleave.controller.views import MAX_DEFERRAL_S, DriftState
from cleave.traffic.counters import Buckets
from cleave.traffic.drift_detector import Quantity, TrafficChange
from cleave.traffic.window import TrafficWindow

from tests.support.deployment_views import NOW_S, traffic

PLANNED_FOR = Workload(
    rate=4,
    prompt_tokens=LengthDistribution(mean=300, p90=400),
    output_tokens=LengthDistribution(mean=30, p90=40),
)
DOUBLED = traffic(4, 600, NOW_S - 300) + traffic(8, 300)


def find_change(
    planned_for: Workload | None, windows: Sequence[TrafficWindow], since_s: float | None
) -> TrafficChange | None:
    return update(DriftState(), planned_for, windows, since_s).change


def test_twice_the_rate_is_a_change_and_the_same_is_none() -> None:
    change = find_change(PLANNED_FOR, DOUBLED, NOW_S - 900)
    assert change is not None
    assert change.quantity is Quantity.RATE
    assert NOW_S - 330 < change.since_s < change.detected_s < NOW_S - 200
    assert find_change(PLANNED_FOR, traffic(4, 600), NOW_S - 900) is None


def test_a_change_that_was_lived_with_does_not_hide_the_next() -> None:
    again = traffic(4, 600, NOW_S - 900) + traffic(8, 600, NOW_S - 300) + traffic(16, 300)
    change = find_change(PLANNED_FOR, again, NOW_S - 1500)
    assert change is not None
    assert NOW_S - 330 < change.since_s < change.detected_s < NOW_S - 200
    assert change.after > 12


def test_before_the_fleet_settles_nothing_is_compared() -> None:
    assert find_change(PLANNED_FOR, DOUBLED, None) is None
    assert find_change(PLANNED_FOR, DOUBLED, NOW_S - 10) is None


def test_undeclared_traffic_is_not_compared() -> None:
    assert find_change(None, DOUBLED, NOW_S - 900) is None


def test_a_look_waits_while_a_change_is_about_to_show_and_not_for_ever() -> None:
    calm = update(DriftState(), PLANNED_FOR, traffic(4, 600), NOW_S - 900)
    assert not calm.should_defer_review(0.0, 300)
    begun = traffic(4, 600, NOW_S - 30) + traffic(8, 30)
    doubtful = update(DriftState(), PLANNED_FOR, begun, NOW_S - 900)
    assert doubtful.change is None
    assert doubtful.should_defer_review(MAX_DEFERRAL_S - 1, 300)
    assert not doubtful.should_defer_review(MAX_DEFERRAL_S, 3600)
    assert doubtful.should_defer_review(2.9, 15)
    assert not doubtful.should_defer_review(3.0, 15)
    assert not DriftState().should_defer_review(0.0, 300)


def test_recent_is_as_long_as_it_has_to_be() -> None:
    def recent_s(windows: Sequence[TrafficWindow], since_s: float, lead_s: float = 0.0) -> float:
        return sum(each.length_s for each in list_recent(windows, since_s, 120, lead_s))

    assert recent_s(DOUBLED, NOW_S - 900) == 120
    assert recent_s(DOUBLED, NOW_S - 900, 60) == 180
    assert recent_s(DOUBLED, NOW_S - 150, 60) == 150
    assert recent_s(DOUBLED, NOW_S - 60) == 60
    # 200 requests take longer than that to come.
    assert 150 <= recent_s(traffic(1, 900), 0) <= 300
    assert recent_s((), 0) == 0


def test_recent_windows_have_the_present_threshold_for_short_prompts() -> None:
    before, after = traffic(4, 600, NOW_S - 150), traffic(4, 150)
    changed = *before, *(replace(each, whole_below_tokens=256) for each in after)
    assert list_recent(changed, NOW_S - 900, 300, 60) == changed[len(before) :]
    assert len(list_recent(before + after, NOW_S - 900, 300, 60)) > len(after)


def test_a_course_goes_on_where_it_was() -> None:
    state = DriftState()
    for count in range(1, len(DOUBLED) + 1):
        state = update(state, PLANNED_FOR, DOUBLED[:count], NOW_S - 900)
    assert state == update(DriftState(), PLANNED_FOR, DOUBLED, NOW_S - 900)
    assert state.change is not None
    assert update(state, PLANNED_FOR, DOUBLED, NOW_S - 900) == state


def test_another_plan_or_another_fleet_begins_a_course_anew() -> None:
    state = update(DriftState(), PLANNED_FOR, DOUBLED, NOW_S - 900)
    other = PLANNED_FOR.model_copy(update={"rate": 8.0})
    assert update(state, other, traffic(8, 300), NOW_S - 900).change is None
    assert update(state, PLANNED_FOR, (), NOW_S).change is None


def test_traffic_that_has_just_changed_is_known_better_each_minute() -> None:
    state = update(DriftState(), PLANNED_FOR, DOUBLED, NOW_S - 900)
    assert state.change is not None
    seen_s = state.change.detected_s
    assert state.has_recent_change(seen_s, 300)
    assert state.has_recent_change(seen_s + 299, 300)
    assert not state.has_recent_change(seen_s + 300, 300)
    assert not DriftState().has_recent_change(seen_s, 300)


def test_requests_that_end_before_a_detected_change_belong_to_the_traffic_before() -> None:
    settled_s = NOW_S - 900
    rate = TrafficChange(NOW_S - 15, NOW_S - 60, Quantity.RATE, 4, 8)
    lengths = TrafficChange(NOW_S - 15, NOW_S - 60, Quantity.PROMPT_TOKENS, 300, 900)
    assert find_current_start_s(DOUBLED, rate, settled_s) == NOW_S - 60
    assert find_current_start_s(DOUBLED, lengths, settled_s) == NOW_S - 15
    # Enough has come since, so that there is no need of what came before.
    known = TrafficChange(NOW_S - 120, NOW_S - 165, Quantity.RATE, 4, 8)
    assert find_current_start_s(DOUBLED, known, settled_s) == NOW_S - 120


def test_a_settled_fleet_is_measured_alone() -> None:
    change = TrafficChange(NOW_S - 120, NOW_S - 165, Quantity.RATE, 4, 8)
    assert find_current_start_s(DOUBLED, change, NOW_S - 60) == NOW_S - 60
    assert (
        find_current_start_s(DOUBLED, replace(change, detected_s=NOW_S - 15), NOW_S - 150)
        == NOW_S - 150
    )
    assert find_current_start_s(DOUBLED, None, NOW_S - 300) == NOW_S - 300


def test_latencies_describe_the_traffic_once_earlier_requests_have_ended() -> None:
    since_s = NOW_S - 300
    assert find_settle_s((), None, since_s, 60) == 60
    assert find_settle_s(DOUBLED, None, since_s, 60) == 60
    long = [replace(each, outputs=Buckets((6000.0,), (50.0,), 3e5)) for each in DOUBLED]
    life_s = find_settle_s(long, None, since_s, 60)
    assert 100 < life_s < 150, "some 5,400 tokens at 20 ms"
    assert find_settle_s((*long[:40], *DOUBLED[40:]), None, since_s, 60) > 60, "nor those before"
    change = TrafficChange(NOW_S - 255, NOW_S - 300, Quantity.RATE, 4, 8)
    assert find_settle_s(long, change, since_s, 60) == life_s + 45
