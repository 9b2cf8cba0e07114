"""From windows back to a workload."""

import math

import numpy as np
import pytest

from cleave.traffic.published import get_workload
from cleave.traffic.refit import (
    MIN_REQUESTS,
    RefitError,
    compute_dispersion,
    compute_margin,
    refit,
    to_demand,
)
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import GeneratedRequests, build_fixed

from tests.support.traffic_windows import draw


def windows(name: str, rate: float, num: int, burstiness: float = 1.0) -> list[TrafficWindow]:
    return list(draw(get_workload(name).build_demand(rate, burstiness), num))


@pytest.mark.parametrize("name", ["azure-code", "azure-conversation", "sharegpt"])
def test_observed_traffic_becomes_the_declared_workload(name: str) -> None:
    demand = get_workload(name).build_demand(10.0)
    drawn = demand.draw(20_000)
    found = refit(windows(name, 10.0, 120))
    assert found.rate == pytest.approx(10.0, rel=0.05)
    for fitted, tokens in (
        (found.prompt_tokens, drawn.prompt_tokens),
        (found.output_tokens, drawn.output_tokens),
    ):
        assert fitted is not None
        assert fitted.mean == pytest.approx(np.mean(tokens), rel=0.06)
        # No log-normal distribution has a higher one than 2.27 means.
        expected = min(np.percentile(tokens, 90), 2.27 * fitted.mean)
        assert fitted.p90 == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("name", ["azure-code", "azure-conversation"])
def test_the_planner_gets_the_very_shape_of_the_lengths(name: str) -> None:
    drawn = get_workload(name).build_demand(10.0).draw(20_000)
    again = to_demand(windows(name, 10.0, 240)).draw(20_000, seed=3)
    for one, other in (
        (drawn.prompt_tokens, again.prompt_tokens),
        (drawn.output_tokens, again.output_tokens),
    ):
        assert np.mean(other) == pytest.approx(np.mean(one), rel=0.06)
        for share in (25, 50, 75, 90):
            assert np.percentile(other, share) == pytest.approx(
                np.percentile(one, share), rel=0.15, abs=2
            )


def test_requests_that_are_all_alike_stay_so() -> None:
    again = to_demand(list(draw(build_fixed(512, 64, 10.0), 30))).draw(1_000)
    assert np.mean(again.prompt_tokens) == pytest.approx(512, rel=0.01)
    assert np.std(again.prompt_tokens) < 0.15 * 512


def test_bursts_are_seen_and_poisson_is_none() -> None:
    calm, bursty = windows("sharegpt", 20.0, 120), windows("sharegpt", 20.0, 120, burstiness=3.0)
    assert math.sqrt(compute_dispersion(calm)) == pytest.approx(1.0, abs=0.2)
    assert math.sqrt(compute_dispersion(bursty)) == pytest.approx(3.0, rel=0.25)
    source = to_demand(bursty).source
    assert isinstance(source, GeneratedRequests)
    assert source.burstiness == pytest.approx(3.0, rel=0.25)
    assert compute_dispersion(bursty[:3]) == 1.0


def test_few_requests_leave_more_room() -> None:
    few, many = windows("sharegpt", 2.0, 10), windows("sharegpt", 20.0, 120)
    assert 0.01 < compute_margin(many) < 0.03
    assert compute_margin(few) > 3 * compute_margin(many)


def test_too_few_requests_state_nothing() -> None:
    short = windows("sharegpt", 1.0, 5)
    for ask in (refit, to_demand, compute_margin):
        with pytest.raises(RefitError, match=f"requests were observed; {MIN_REQUESTS} are needed"):
            ask(short)
    with pytest.raises(RefitError, match="0 requests"):
        refit([])
