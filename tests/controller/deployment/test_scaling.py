"""How many instances run while the plan stays the same: the law, hysteresis, zero and back."""

import json
import math
from collections import deque
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.deployment import LLMDeployment
from cleave.api.plan import SelectedPlan
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.api.scaling import Scaling, ScheduledPeak
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.deployment.scaling import (
    compute_counts,
    compute_replicas,
    compute_scheduled_rate,
    count_engines,
    count_instances,
    measure_demand,
    scale,
)
from cleave.controller.views import DeploymentView, TrafficDemand
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.traffic.window import TrafficWindow

from tests.support.fake_cluster import chat

P, D = Role.PREFILL, Role.DECODE
LATENCIES = {"ttftMs": {}, "tpotMs": {}}


def plan(
    prefill: int = 1, decode: int = 2, workers: int = 1, goodput: float = 4.0, **growth: float
) -> SelectedPlan:
    """Of workers that serve 4 req/s each, unless `growth` says otherwise."""
    law = {"workers": workers, "perRate": 0.25, "base": 0.0, "lowestRate": 0.0, **growth}
    predicted = {
        "goodput": goodput, "goodputLow": 1, "goodputHigh": 9, "goodputPerGpu": 1, "attainment": 1,
        "costPerHour": 0, "powerWatts": 0, "trust": "", **LATENCIES,
    }  # fmt: skip
    pools = [{"role": "prefill", "replicas": prefill}, {"role": "decode", "replicas": decode}]
    pool_status = {"revision": "a", "reason": "", "gpus": prefill + decode, "pools": pools}
    return SelectedPlan.model_validate({**pool_status, "predicted": predicted, "growth": law})


def terms(most: int = 100, **fields: Any) -> Scaling:
    roles = [{"role": role, "maxReplicas": most} for role in ("prefill", "decode")]
    return Scaling.model_validate({"roles": roles, **fields})


def demand(rate: float, peak: float | None = None, in_flight: float = 1, quiet_s: float = 0):
    return TrafficDemand(rate, peak, in_flight, quiet_s)


def test_a_rate_gets_as_many_workers_as_the_line_says_in_the_plans_proportion() -> None:
    assert compute_replicas(terms(), plan(), 4.0) == {P: 1, D: 2}
    assert compute_replicas(terms(), plan(), 8.0) == {P: 2, D: 4}
    assert compute_replicas(terms(), plan(), 8.1) == {P: 3, D: 6}


def test_a_part_of_a_large_worker_is_enough_for_a_part_of_its_rate() -> None:
    small = compute_replicas(terms(), plan(prefill=3, decode=5), 5.0)
    # 1.25 workers by the line, half a one more for what it leaves out.
    assert small == {P: math.ceil(3 * 1.75), D: math.ceil(5 * 1.75)}


def test_what_the_plan_was_found_to_serve_takes_no_more_than_the_plan() -> None:
    assert compute_replicas(terms(), plan(prefill=3, decode=5), 3.9) == {P: 3, D: 5}


def test_bounds_are_kept_role_by_role() -> None:
    roles = [
        {"role": "prefill", "minReplicas": 2, "maxReplicas": 3},
        {"role": "decode", "maxReplicas": 5},
    ]
    scaling = Scaling.model_validate({"roles": roles})
    assert compute_replicas(scaling, plan(), 0.0) == {P: 2, D: 1}
    assert compute_replicas(scaling, plan(), 40.0) == {P: 3, D: 5}


def test_a_role_that_is_not_named_keeps_the_plans_number() -> None:
    scaling = Scaling.model_validate({"roles": [{"role": "decode", "maxReplicas": 9}]})
    assert compute_replicas(scaling, plan(), 16.0) == {P: 1, D: 8}


@given(st.floats(0, 1000), st.floats(0, 1000), st.integers(1, 5), st.integers(1, 5))
def test_a_higher_rate_never_gets_fewer(one: float, other: float, p: int, d: int) -> None:
    low, high = sorted((one, other))
    few, many = (compute_replicas(terms(10_000), plan(p, d), rate) for rate in (low, high))
    assert all(few[role] <= many[role] for role in few)


@given(st.floats(0, 1000), st.integers(1, 4), st.integers(1, 4))
def test_there_are_never_fewer_than_the_line_itself_says(rate: float, p: int, d: int) -> None:
    line = 0.25 * rate
    found = compute_replicas(terms(10_000), plan(p, d, goodput=0.0), rate)
    assert found[P] >= p * line - 1e-6
    assert found[D] >= d * line - 1e-6


NOW = {P: 2, D: 4}


def test_more_come_at_once() -> None:
    assert scale(terms(), plan(), {P: 1, D: 2}, demand(rate=7.9)) == NOW


def test_fewer_stay_when_every_minute_has_been_calm_for_long_enough() -> None:
    assert scale(terms(), plan(), NOW, demand(rate=3.9, peak=None)) == NOW
    assert scale(terms(), plan(), NOW, demand(rate=3.9, peak=7.9)) == NOW
    assert scale(terms(), plan(), NOW, demand(rate=3.9, peak=3.9)) == {P: 1, D: 2}


def test_a_peak_repurposes_no_instance() -> None:
    assert scale(terms(), plan(), {P: 1, D: 2}, demand(rate=3.9, peak=40.0)) == {P: 1, D: 2}


def test_a_few_requests_do_not_count_as_steady_traffic() -> None:
    # 6 req/s are needed to know a minute; in a calm of five, a fifth of that.
    scaling, law = terms(calmS=300), plan(goodput=40.0, workers=10, prefill=10, decode=20,
                                        lowestRate=60.0)  # fmt: skip
    now = {P: 10, D: 20}
    assert scale(scaling, law, now, demand(rate=1.0, peak=1.0)) == compute_replicas(
        scaling, law, 12.0
    )


def test_nothing_changes_while_no_traffic_is_reported() -> None:
    assert scale(terms(), plan(), NOW, None) == NOW
    assert scale(terms(), plan(), {}, None) == {P: 1, D: 2}


def test_the_planned_count_stays_without_autoscaling() -> None:
    assert scale(Scaling(), plan(), {P: 9, D: 9}, demand(rate=99.0)) == {P: 1, D: 2}


def test_there_are_never_more_gpus_than_the_deployment_may_have() -> None:
    found = scale(terms(), plan(), {}, demand(rate=400.0), max_gpus=10)
    assert sum(found.values()) <= 10
    assert sum(found.values()) > 6


@pytest.mark.parametrize(("own", "quota"), [(10, None), (None, 10), (10, 99), (99, 10)])
def test_the_quota_bounds_what_scaling_adds(own: int | None, quota: int | None) -> None:
    spec = chat(planning={"maxGPUs": own} if own else {})
    spec["spec"]["scaling"] = terms().model_dump(mode="json", by_alias=True, exclude_none=True)
    view = DeploymentView(
        resolve_in_cluster(LLMDeployment.model_validate_json(json.dumps(spec))),
        build_inventory([]),
        now_s=0.0,
        demand=demand(rate=400.0),
        max_gpus=quota,
    )
    written = plan().model_dump(mode="json", exclude_none=True)
    assert 6 < sum(compute_counts(view, written).values()) <= 10


IDLE = {"idleS": 60}
NONE = {P: 0, D: 0}


def test_all_instances_go_after_the_configured_idle_time() -> None:
    scaling = terms(**IDLE)
    assert scale(scaling, plan(), NOW, demand(0, 0, in_flight=0, quiet_s=59)) != NONE
    assert scale(scaling, plan(), NOW, demand(0, 0, in_flight=0, quiet_s=60)) == NONE
    assert scale(scaling, plan(), NOW, demand(0, 0, in_flight=1, quiet_s=60)) != NONE


def test_the_first_request_brings_them_back() -> None:
    scaling = terms(**IDLE)
    assert scale(scaling, plan(), NONE, demand(0, 0, in_flight=0, quiet_s=1)) == NONE
    assert scale(scaling, plan(), NONE, demand(0, 0, in_flight=1, quiet_s=0)) == {P: 1, D: 1}
    # Without a law it is the plan that comes back.
    bare = plan().model_copy(update={"growth": None})
    assert scale(scaling, bare, NONE, demand(0, 0, in_flight=1)) == {P: 1, D: 2}


def test_they_sleep_on_while_no_gateway_answers_and_wake_when_the_field_goes() -> None:
    assert scale(terms(**IDLE), plan(), NONE, None) == NONE
    woken = scale(terms(), plan(), NONE, None)
    assert all(woken.values())


def window(end_s: float, requests: float, length_s: float = 15.0) -> TrafficWindow:
    return TrafficWindow(end_s=end_s, length_s=length_s, num_requests=requests)


def test_a_rate_is_that_of_a_minute_and_the_peak_that_of_the_calm() -> None:
    windows = [window(15.0 * n, 150 if n == 10 else 15) for n in range(1, 41)]
    found = measure_demand(windows, calm_s=300, in_flight=2, idle_s=0)
    assert found == TrafficDemand(rate=1.0, peak=1.0, in_flight=2, idle_s=0)
    found = measure_demand(windows, calm_s=480, in_flight=2, idle_s=0)
    assert found is not None
    assert found.peak == pytest.approx((150 + 45) / 60)


def test_a_calm_that_was_not_watched_from_its_beginning_is_none() -> None:
    windows = [window(15.0 * n, 15) for n in range(1, 11)]
    found = measure_demand(windows, calm_s=300, in_flight=0, idle_s=0)
    assert found is not None
    assert found.peak is None
    assert measure_demand([], calm_s=300, in_flight=0, idle_s=0) is None


@pytest.mark.parametrize(
    ("moment", "rate"),
    [
        ("2026-11-20T08:59:59Z", 0),
        ("2026-11-20T09:00:00Z", 7),
        ("2026-11-20T09:59:59Z", 7),
        ("2026-11-20T10:00:00Z", 0),
        ("2026-11-21T09:00:00Z", 0),
        ("2026-11-23T09:30:00Z", 9),
    ],
)
def test_a_known_peak_lasts_from_its_beginning_for_so_long(moment: str, rate: float) -> None:
    schedule = [
        ScheduledPeak(cron="0 9 * * 1-5", duration_s=3600, rate=7),
        ScheduledPeak(cron="15 9 * * mon", duration_s=3600, rate=9),
    ]
    now_s = datetime.fromisoformat(moment).timestamp()
    assert compute_scheduled_rate(schedule, now_s) == rate


def test_a_known_peak_has_what_it_needs_before_the_traffic_comes() -> None:
    scaling = terms(**IDLE)
    quiet = demand(0, 0, in_flight=0, quiet_s=999)
    assert scale(scaling, plan(), NONE, quiet, min_rate=7.9) == NOW
    assert scale(scaling, plan(), NONE, None, min_rate=7.9) == NOW
    assert scale(scaling, plan(), {P: 1, D: 2}, demand(12.0), min_rate=7.9) == {P: 3, D: 6}
    assert scale(scaling, plan(), NOW, demand(1.0, 1.0), min_rate=7.9) == NOW


@settings(max_examples=25)
@given(
    period_s=st.integers(1, 1800),
    share=st.floats(0.05, 0.95),
    high=st.floats(1, 40),
    low=st.floats(0, 10),
    calm_s=st.sampled_from([120, 300, 900]),
)
def test_an_added_instance_stays_for_the_calm_period_under_any_wave(
    period_s: int, share: float, high: float, low: float, calm_s: int
) -> None:
    """An hour of a square wave, looked at every 15 s; windows are kept for half an hour."""
    scaling, windows, now = terms(calmS=calm_s), deque[TrafficWindow](maxlen=128), dict[Role, int]()
    came_s = -math.inf
    for end_s in range(15, 3600, 15):
        seconds = range(end_s - 15, end_s)
        arrived = sum(high if each % period_s < share * period_s else low for each in seconds)
        windows.append(window(end_s, arrived))
        seen = measure_demand(tuple(windows), calm_s, in_flight=1, idle_s=0)
        then = dict(scale(scaling, plan(), now, seen))
        if any(then[role] > count for role, count in now.items()):
            came_s = end_s
        elif then != now and now:
            assert end_s - came_s >= calm_s
        now = then


def test_cells_in_one_pod_are_scaled_as_a_whole() -> None:
    members = [{"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 3}]
    spec = {"deployment": "chat", "role": "mixed", "replicas": 2, "revision": "a", "model": "m"}
    cells = InstancePool.model_validate(
        {"metadata": {"name": "chat-mixed"}, "spec": {**spec, "members": members}}
    )
    assert count_engines([cells]) == {P: 4, D: 6}
    for counts, replicas in (({P: 4, D: 6}, 2), ({P: 5, D: 6}, 3), ({P: 0, D: 0}, 0)):
        assert count_instances(cells, counts) == replicas
    alone = cells.model_copy(update={"spec": cells.spec.model_copy(update={"members": []})})
    assert count_engines([alone]) == {Role.MIXED: 2}
    assert count_instances(alone, {Role.MIXED: 5}) == 5
    assert count_instances(alone, {P: 1}) == 2
