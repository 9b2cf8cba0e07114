"""Two looks at the counts, and windows put together."""

import math
from dataclasses import replace

import pytest

from cleave.traffic.counters import Buckets, GatewayCounters
from cleave.traffic.window import TrafficWindow, compute_window, join_windows, list_settled

BEFORE = GatewayCounters(
    at_s=100.0, started_s=1.0, requests=50, in_flight=4, measured=40, attained=30
)
AFTER = replace(
    BEFORE,
    at_s=115.0,
    requests=80,
    in_flight=10,
    measured=60,
    attained=45,
    ttft=Buckets((0.1, 0.2, math.inf), (10.0, 20.0, 20.0), 2.5),
)


def test_arrivals_are_those_that_ended_and_what_more_is_under_way() -> None:
    window = compute_window(BEFORE, AFTER)
    assert window is not None
    assert (window.num_requests, window.rate) == (36, 2.4)
    assert (window.start_s, window.end_s) == (100.0, 115.0)
    assert window.attainment == 0.75
    assert window.ttft_p50_ms == pytest.approx(100)
    assert window.tpot.compute_quantile_ms(0.9) is None


def test_work_that_drains_is_no_negative_traffic() -> None:
    gone = replace(AFTER, requests=51, in_flight=0)
    window = compute_window(BEFORE, gone)
    assert window is not None
    assert window.num_requests == 0


@pytest.mark.parametrize(
    "after",
    [replace(AFTER, at_s=100.0), replace(AFTER, started_s=110.0), replace(AFTER, requests=3)],
    ids=["no time", "begun anew", "fallen"],
)
def test_where_counting_began_anew_nothing_is_known(after: GatewayCounters) -> None:
    assert compute_window(BEFORE, after) is None


def test_joined_windows_are_as_one_look_over_both() -> None:
    later = replace(AFTER, at_s=130.0, requests=90, measured=70, ttft=AFTER.ttft + AFTER.ttft)
    apart = [compute_window(BEFORE, AFTER), compute_window(AFTER, later)]
    assert join_windows([each for each in apart if each]) == compute_window(BEFORE, later)


def test_a_window_has_the_threshold_of_its_end() -> None:
    ends = [replace(AFTER, at_s=115.0 + tokens, whole_below_tokens=tokens) for tokens in (64, 256)]
    windows = [compute_window(BEFORE, ends[0]), compute_window(*ends)]
    assert [each.whole_below_tokens for each in windows if each] == [64, 256]
    assert join_windows([each for each in windows if each]).whole_below_tokens == 256


def test_tokens_of_the_tier_flex_are_compared_with_all_others() -> None:
    lengths = Buckets((math.inf,), (2.0,), 100.0)
    later = replace(AFTER, prompts=lengths, outputs=lengths, flex_tokens=50)
    window = compute_window(BEFORE, later)
    assert window is not None
    assert (window.flex_share, window.num_requests) == (0.25, 36)
    assert TrafficWindow(0.0, 1.0, 0.0).flex_share == 0.0
    assert TrafficWindow(0.0, 1.0, 0.0, flex_tokens=1).flex_share == math.inf


def serve(*counts: tuple[float, float]) -> tuple[TrafficWindow, ...]:
    """Of requests that came and that ended in each quarter of a minute."""
    return tuple(
        TrafficWindow(
            15.0 * at, 15.0, came, prompts=Buckets((100.0, math.inf), (ended, ended), ended)
        )
        for at, (came, ended) in enumerate(counts, 1)
    )


CALM = tuple((100.0, 100.0 + each % 3) for each in range(10))


@pytest.mark.parametrize(
    ("before", "left"),
    [
        ((), 6),
        (((100, 100),) * 4 + ((100, 150),) * 4, 10),
        (((100, 80),) * 10, 16),
    ],
    ids=["the first minute", "a backlog drains", "a queue grows"],
)
def test_latencies_describe_the_traffic_once_earlier_requests_are_gone(before, left) -> None:
    windows = serve(*before, *CALM)
    assert list_settled(windows, 60) == windows[-left:]


def test_a_backlog_that_drains_slowly_is_seen_after_a_while() -> None:
    windows = serve(*((100, 108),) * 40, *CALM)
    assert len(CALM) <= len(list_settled(windows, 60)) < len(CALM) + 15


def test_in_the_first_minute_nothing_has_settled() -> None:
    assert list_settled(serve(*CALM[:4]), 60) == ()
    assert list_settled((), 60) == ()


def test_there_is_no_window_of_nothing() -> None:
    with pytest.raises(ValueError, match="none to join"):
        join_windows([])
    assert TrafficWindow(1.0, 1.0, 0.0).attainment is None


def test_buckets_of_different_gateways_are_added_where_both_know() -> None:
    coarse = Buckets((1.0, math.inf), (3.0, 4.0), 5.0)
    fine = Buckets((0.5, 1.0, math.inf), (1.0, 2.0, 2.0), 1.0)
    assert coarse + fine == Buckets((0.5, 1.0, math.inf), (1.0, 5.0, 6.0), 6.0)
    assert Buckets() + fine == fine


def test_a_life_lasts_from_first_to_last() -> None:
    tokens = Buckets((100.0, 200.0, math.inf), (0.0, 10.0, 10.0), 1500.0)
    tpot = Buckets((0.02, 0.03, math.inf), (0.0, 10.0, 10.0), 0.25)
    ttft = Buckets((1.0, 2.0, math.inf), (0.0, 10.0, 10.0), 15.0)
    seen = TrafficWindow(100.0, 15.0, 10.0, outputs=tokens, ttft=ttft, tpot=tpot)
    assert seen.lifetime_s == pytest.approx(1.9 + 190 * 0.029)
    assert TrafficWindow(100.0, 15.0, 10.0).lifetime_s == 0.0
