"""Changes of traffic are seen, and chance is not taken for one."""

from collections.abc import Iterable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.workload import LengthDistribution, Workload
from cleave.traffic.drift_detector import (
    DriftDetector,
    Quantity,
    TrafficChange,
    TrafficReference,
    update_detector,
)
from cleave.traffic.published import get_workload
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import Demand

from tests.support.traffic_windows import PERIOD_S, draw

CALM = 120
"""Periods, half an hour."""


def follow(
    windows: Iterable[TrafficWindow], detector: DriftDetector | None = None
) -> tuple[DriftDetector, list[TrafficChange]]:
    changes = []
    detector = detector or DriftDetector()
    for window in windows:
        detector, change = update_detector(detector, window)
        if change is not None:
            changes.append(change)
    return detector, changes


def move(before: Demand, after: Demand, seed: int) -> list[TrafficChange]:
    calm = draw(before, CALM, seed=seed)
    return follow(chain(calm, draw(after, CALM, CALM * PERIOD_S, seed + 1)))[1]


CONVERSATION, CODE = get_workload("azure-conversation"), get_workload("azure-code")


@pytest.mark.parametrize(
    ("name", "rate", "burstiness", "most"),
    # Each two of workload, rate and burstiness are there together. Periods of 15 s; false alarms of
    # 5,000 of them, which are 21 hours.
    [
        ("azure-conversation", 0.3, 1.0, 4),
        ("azure-code", 0.3, 3.0, 4),
        ("sharegpt", 0.3, 1.0, 4),
        ("azure-conversation", 2.0, 3.0, 4),
        ("azure-code", 2.0, 1.0, 3),
        ("sharegpt", 2.0, 3.0, 4),
        ("azure-conversation", 20.0, 3.0, 1),
        ("azure-code", 20.0, 1.0, 0),
        ("sharegpt", 20.0, 1.0, 0),
    ],
)
def test_in_a_day_of_steady_traffic_hardly_a_change_is_seen(
    name: str, rate: float, burstiness: float, most: int
) -> None:
    _, changes = follow(draw(get_workload(name).build_demand(rate, burstiness), 5_000))
    assert len(changes) <= most


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rate", "periods"), [(0.3, 25), (2.0, 6), (20.0, 4)])
def test_twice_the_rate_is_seen_soon(rate: float, periods: int, seed: int) -> None:
    first = move(CONVERSATION.build_demand(rate), CONVERSATION.build_demand(2 * rate), seed)[0]
    assert first.quantity is Quantity.RATE
    assert 0 < first.detected_s / PERIOD_S - CALM <= periods
    assert first.after == pytest.approx(2 * rate, rel=0.5)


@pytest.mark.parametrize("seed", range(5))
def test_the_begin_of_a_change_is_reported(seed: int) -> None:
    first = move(CONVERSATION.build_demand(10.0), CONVERSATION.build_demand(20.0), seed)[0]
    assert first.since_s / PERIOD_S == pytest.approx(CALM, abs=1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.5, 5.0, 50.0])
def test_conversations_after_code_are_seen_by_their_lengths(rate: float, seed: int) -> None:
    first = move(CODE.build_demand(rate), CONVERSATION.build_demand(rate), seed)[0]
    assert first.quantity is not Quantity.RATE
    assert 0 < first.detected_s / PERIOD_S - CALM <= 8


@pytest.mark.parametrize("seed", range(3))
def test_after_a_change_the_new_traffic_is_what_it_is_compared_with(seed: int) -> None:
    calm = draw(CONVERSATION.build_demand(10.0), CALM, seed=seed)
    more = draw(CONVERSATION.build_demand(20.0), 2 * CALM, CALM * PERIOD_S, seed + 1)
    detector, changes = follow(chain(calm, more))
    assert len(changes) == 1
    assert detector.reference is not None
    assert detector.reference.rate == pytest.approx(20.0, rel=0.1)


def test_a_single_burst_is_no_change() -> None:
    detector, _ = follow(draw(CONVERSATION.build_demand(10.0), CALM))
    burst = next(iter(draw(CONVERSATION.build_demand(200.0), 1, CALM * PERIOD_S)))
    detector, changes = follow(
        [burst, *draw(CONVERSATION.build_demand(10.0), CALM, (CALM + 1) * PERIOD_S, 5)], detector
    )
    assert changes == []


def test_silence_is_a_change_of_the_rate_alone() -> None:
    detector, _ = follow(draw(CONVERSATION.build_demand(10.0), CALM))
    silent = (TrafficWindow((CALM + each + 1) * PERIOD_S, PERIOD_S, 0.0) for each in range(CALM))
    _, changes = follow(silent, detector)
    assert [(each.quantity, each.after) for each in changes] == [(Quantity.RATE, 0.0)]
    assert str(changes[0]).endswith(" to 0 req/s")


def test_a_plan_for_other_traffic_is_reported_from_the_first_windows_on() -> None:
    declared = Workload(
        rate=10,
        prompt_tokens=LengthDistribution(mean=300, p90=600),
        output_tokens=LengthDistribution(mean=220, p90=440),
    )
    _, changes = follow(
        draw(CONVERSATION.build_demand(10.0), 10),
        DriftDetector(TrafficReference.from_workload(declared)),
    )
    assert changes[0].quantity is Quantity.PROMPT_TOKENS
    assert changes[0].before == 300
    assert changes[0].detected_s <= 6 * PERIOD_S
    assert TrafficReference.from_workload(Workload(trace={"path": "day.csv"})) is None


@settings(max_examples=25, derandomize=True)
@given(
    st.floats(0.05, 200.0),
    st.floats(0.5, 2.5),
    st.sampled_from(["chat-1m", "arxiv-4k", "humaneval", "longbench"]),
    st.integers(0, 1000),
)
def test_steady_traffic_of_any_kind_stays_calm_for_an_hour(
    rate: float, burstiness: float, name: str, seed: int
) -> None:
    detector, changes = follow(
        draw(get_workload(name).build_demand(rate, burstiness), 240, seed=seed)
    )
    assert len(changes) <= 1
    assert len(detector.windows) <= 240
