"""Traffic in status: its values, and how often it is written."""

import math
from dataclasses import replace

from cleave.controller.deployment.traffic_status import (
    build_prometheus_condition,
    build_slo_condition,
    report_traffic,
)
from cleave.controller.views import DeploymentView
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.traffic.counters import Buckets
from cleave.traffic.window import TrafficWindow, join_windows

from tests.support.deployment_views import NOW_S, ask, deployment, status, view

LATER_S = 61.0


def seen(rate: float = 4) -> DeploymentView:
    desired = deployment()
    return replace(view(desired, status(desired)), traffic=join_windows(ask(rate, 60)))


def test_rates_lengths_and_latencies_are_reported() -> None:
    reported = report_traffic(seen())
    assert reported is not None
    assert reported["windowS"] == 60
    assert 2 < reported["rate"] < 6
    assert 250 < reported["promptTokens"]["mean"] < 350
    assert 25 < reported["outputTokens"]["mean"] < 35
    assert "ttftMs" not in reported


def test_the_share_of_prompts_that_repeat_is_reported_where_gateways_count_it() -> None:
    assert "repeatedShare" not in (report_traffic(seen()) or {})
    reuse = Buckets((64.0, math.inf), (250.0, 1_000.0))
    reported = report_traffic(replace(seen(), traffic=replace(seen().traffic, reuse=reuse)))
    assert reported is not None
    assert reported["repeatedShare"] == 0.25


def test_zero_requests_are_reported_as_such() -> None:
    nothing = replace(seen(), traffic=TrafficWindow(NOW_S, 60.0, 0.0))
    reported = report_traffic(nothing)
    assert reported is not None
    assert reported["rate"] == 0
    assert "promptTokens" not in reported


def test_traffic_is_reported_at_most_once_a_minute_and_only_on_change() -> None:
    first = seen()
    reported = report_traffic(first)
    doubled = replace(seen(8), status={**first.status, "observed": reported})
    assert report_traffic(replace(doubled, now_s=NOW_S + 30)) == reported
    moved = report_traffic(replace(doubled, now_s=NOW_S + LATER_S))
    assert moved is not None
    assert moved["rate"] > 6
    same = replace(first, status=doubled.status, now_s=NOW_S + LATER_S)
    assert report_traffic(same) == reported


def test_values_that_are_no_longer_known_stay_reported() -> None:
    reported = report_traffic(seen())
    silent = replace(seen(), traffic=None, status={"observed": reported})
    assert report_traffic(silent) == reported


def test_without_a_poller_no_traffic_is_reported() -> None:
    off = deployment({"mode": "Off"})
    assert report_traffic(replace(seen(), resolved=resolve_in_cluster(off))) is None


def measured(share: float, rate: float = 4) -> DeploymentView:
    window = replace(join_windows(ask(rate, 60)), measured=1_000, attained=1_000 * share)
    return replace(seen(), traffic=window)


def test_the_condition_compares_the_reported_share_with_the_target() -> None:
    for share, is_met, reason in ((0.9, True, "Attained"), (0.899, False, "Missed")):
        here = measured(share)
        (condition,) = build_slo_condition(here.deployment, report_traffic(here), NOW_S)
        assert (condition.type, condition.status, condition.reason) == (
            "SLOAttained",
            is_met,
            reason,
        )
        assert f"{share:.1%} of the measured requests were within TTFT " in condition.message
        assert "target 90.0%" in condition.message


def test_few_and_unmeasured_requests_prove_nothing() -> None:
    few = replace(measured(0.5), traffic=TrafficWindow(NOW_S, 60.0, 500.0, measured=9, attained=4))
    whole = seen()
    for here, reason in ((few, "TooFewRequests"), (whole, "NotMeasured")):
        (condition,) = build_slo_condition(here.deployment, report_traffic(here), NOW_S)
        assert (condition.status, condition.reason) == (None, reason)
    assert build_slo_condition(whole.deployment, None, NOW_S) == []


def test_the_condition_judges_each_latency_by_its_own_share() -> None:
    desired = deployment(slo={"ttftMs": 400, "tpotMs": 40, "tpotAttainment": 0.99})
    for met, is_met in ((990, True), (989, False)):
        here = measured(0.95)
        shares = {"ttft_attained": 960.0, "tpot_attained": float(met)}
        traffic = replace(here.traffic or TrafficWindow(0.0, 1.0, 0.0), **shares)
        resolved = resolve_in_cluster(desired)
        reported = report_traffic(replace(here, resolved=resolved, traffic=traffic))
        (condition,) = build_slo_condition(desired, reported, NOW_S)
        assert condition.status is is_met
        assert f"; within TPOT {met / 1000:.1%}, target 99.0%; " in condition.message


def test_the_condition_judges_the_gaps_that_gateways_timed() -> None:
    desired = deployment(slo={"ttftMs": 400, "tpotMs": 40, "itlP99Ms": 60})
    for late, num, is_met, text in (
        (9, 1_000, True, "; ITL P99 60 ms, target 60 ms"),
        (11, 1_000, False, "; ITL P99 63.6 ms, target 60 ms"),
        (99, 100, True, "; ITL P99 of too few gaps to tell, target 60 ms"),
    ):
        gaps = Buckets((0.05, 0.06, 0.1, math.inf), (0.0, num - late, num, num))
        here = measured(0.95)
        traffic = replace(here.traffic or TrafficWindow(0.0, 1.0, 0.0), itl=gaps)
        reported = report_traffic(
            replace(here, resolved=resolve_in_cluster(desired), traffic=traffic)
        )
        (condition,) = build_slo_condition(desired, reported, NOW_S)
        assert condition.status is is_met
        assert text in condition.message


def test_a_condition_says_what_prometheus_does_not_have() -> None:
    assert build_prometheus_condition(None) == [], "it is not asked"
    (read,), (away,) = map(build_prometheus_condition, ("", "Prometheus at http://p: refused"))
    assert (read.type, read.status, read.reason) == ("PrometheusRead", True, "Read")
    assert (away.status, away.reason) == (False, "NotRead")
    assert away.message == (
        "Prometheus at http://p: refused; the operator reads the gateways themselves instead"
    )


def test_a_small_change_across_the_target_is_reported() -> None:
    before = measured(0.905)
    reported = report_traffic(before)
    assert reported is not None
    later = replace(before, status={"observed": reported}, now_s=NOW_S + LATER_S)
    assert report_traffic(later) == reported
    assert before.traffic is not None
    missed = replace(later, traffic=replace(before.traffic, attained=895))
    now = report_traffic(missed)
    assert now is not None
    assert now["attainment"] == 0.895


def test_unchanged_figures_are_written_again_after_five_minutes() -> None:
    before = measured(0.95)
    reported = report_traffic(before)
    later = replace(before, status={"observed": reported}, now_s=NOW_S + 299)
    assert report_traffic(later) == reported
    again = report_traffic(replace(later, now_s=NOW_S + 300))
    assert reported is not None
    assert again is not None
    assert again == {**reported, "at": again["at"]} != reported


def test_the_condition_is_unknown_once_no_gateway_has_reported_for_ten_minutes() -> None:
    before = measured(0.95)
    reported = report_traffic(before)
    for age_s, is_met in ((600, True), (601, None)):
        silent = replace(before, traffic=None, status={"observed": reported}, now_s=NOW_S + age_s)
        kept = report_traffic(silent)
        (condition,) = build_slo_condition(silent.deployment, kept, silent.now_s)
        assert condition.status is is_met
    assert condition.reason == "NotObserved"
    assert condition.message.endswith("since 2023-11-14T22:13:20Z")


def test_a_new_operator_keeps_figures_that_count_until_it_has_seen_a_minute() -> None:
    before = measured(0.95)
    reported = report_traffic(before)
    first_scrape = TrafficWindow(NOW_S, 15.0, 9.0, measured=9, attained=4)
    for age_s, is_kept in ((90, True), (600, True), (601, False)):
        started = replace(
            before, traffic=first_scrape, status={"observed": reported}, now_s=NOW_S + age_s
        )
        assert (report_traffic(started) == reported) is is_kept
    whole = replace(first_scrape, length_s=60.0)
    seen = replace(before, traffic=whole, status={"observed": reported}, now_s=NOW_S + 90)
    assert report_traffic(seen) != reported
