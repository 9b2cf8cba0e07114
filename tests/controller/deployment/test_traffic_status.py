"""Traffic in status: what it says, and how seldom."""

from dataclasses import replace

from cleave.controller.deployment.traffic_status import report_traffic
from cleave.controller.views import DeploymentView
from cleave.traffic.window import TrafficWindow, join_windows

from tests.support.deployment_views import NOW_S, ask, deployment, status, view

LATER_S = 61.0


def seen(rate: float = 4) -> DeploymentView:
    asked = deployment()
    return replace(view(asked, status(asked)), traffic=join_windows(ask(rate, 60)))


def test_rates_lengths_and_latencies_are_told() -> None:
    told = report_traffic(seen())
    assert told is not None
    assert told["windowS"] == 60
    assert 2 < told["rate"] < 6
    assert 250 < told["promptTokens"]["mean"] < 350
    assert 25 < told["outputTokens"]["mean"] < 35
    assert "ttftMs" not in told


def test_no_request_is_told_as_such() -> None:
    nothing = replace(seen(), traffic=TrafficWindow(NOW_S, 60.0, 0.0))
    told = report_traffic(nothing)
    assert told is not None
    assert told["rate"] == 0
    assert "promptTokens" not in told


def test_it_is_told_at_most_once_a_minute_and_only_when_it_has_moved() -> None:
    first = seen()
    told = report_traffic(first)
    doubled = replace(seen(8), status={**first.status, "observed": told})
    assert report_traffic(replace(doubled, now_s=NOW_S + 30)) == told
    moved = report_traffic(replace(doubled, now_s=NOW_S + LATER_S))
    assert moved is not None
    assert moved["rate"] > 6
    same = replace(first, status=doubled.status, now_s=NOW_S + LATER_S)
    assert report_traffic(same) == told


def test_what_is_not_known_any_more_stays_told() -> None:
    told = report_traffic(seen())
    silent = replace(seen(), traffic=None, status={"observed": told})
    assert report_traffic(silent) == told


def test_who_does_not_watch_tells_nothing() -> None:
    off = deployment({"mode": "Off"})
    assert report_traffic(replace(seen(), deployment=off)) is None
