"""When the running plan is reviewed, and what status says until the planner answers."""

import math
from dataclasses import replace

import pytest

from cleave.api.pool import CellMember
from cleave.api.replan_status import LatencyCorrection
from cleave.api.role import Role
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.objects import ObservedPod, format_timestamp
from cleave.controller.replan.inputs import PlanInputs
from cleave.controller.replan.reconcile import is_urgent, reconcile_plan, update_drift
from cleave.controller.replan.verdict import ReplanOutcome
from cleave.controller.views import MAX_DEFERRAL_S, DriftState
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.traffic.counters import Buckets

from tests.support.deployment_views import (
    DECLARED,
    INTERVAL_S,
    INVENTORY,
    NOW_S,
    ask,
    deployment,
    plan,
    status,
    traffic,
    view,
)
from tests.support.fake_cluster import manual_placement


def said(found: ReplanOutcome, kind: str = "PlanDrifted") -> tuple[bool | None, str]:
    condition = next(each for each in found.conditions if each.type == kind)
    return condition.status, condition.reason


def test_observed_traffic_is_planned_in_declared_conversations() -> None:
    reuse = {"turns": 4, "turnIntervalS": 20, "newTokens": 100}
    desired = deployment(workload={**DECLARED, "reuse": reuse})
    found = reconcile_plan(view(desired, status(desired), windows=traffic(4)))
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    assert found.plan_request.fitted_inputs.workload.reuse == desired.spec.workload.reuse


def test_what_repeats_in_observed_traffic_is_planned_where_the_workload_says_nothing() -> None:
    desired = deployment()
    reuse = Buckets((64.0, 128.0, math.inf), (0.0, 600.0, 1_000.0))
    windows = tuple(replace(each, reuse=reuse) for each in traffic(4))
    found = reconcile_plan(view(desired, status(desired), windows=windows))
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    learned = found.plan_request.fitted_inputs.workload.reuse
    assert learned is not None
    assert learned.turns > 2
    assert learned.turn_interval_s == pytest.approx(96)
    declared = {"turns": 4, "turnIntervalS": 20, "newTokens": 100}
    desired = deployment(workload={**DECLARED, "reuse": declared})
    found = reconcile_plan(view(desired, status(desired), windows=windows))
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    assert found.plan_request.fitted_inputs.workload.reuse == desired.spec.workload.reuse


def test_traffic_as_planned_is_looked_at_once_in_an_interval() -> None:
    desired = deployment()
    found = reconcile_plan(view(desired, status(desired), windows=traffic(4)))
    assert found.plan_request is not None
    review = found.plan_request.review
    assert review is not None
    assert [(pool.role, pool.replicas) for pool in review.pools] == [
        (Role.PREFILL, 1),
        (Role.DECODE, 1),
    ]
    assert not review.settings.is_advisory
    assert found.plan_request.fitted_inputs is not None
    assert found.plan_request.fitted_inputs.workload.rate == pytest.approx(4, rel=0.15)
    assert said(found) == (None, "NotCompared")
    reported = status(
        desired, prediction={"at": format_timestamp(NOW_S - INTERVAL_S + 9), "attainment": 1}
    )
    assert reconcile_plan(view(desired, reported, windows=traffic(4))).plan_request is None
    reported = status(
        desired, prediction={"at": format_timestamp(NOW_S - INTERVAL_S), "attainment": 1}
    )
    assert reconcile_plan(view(desired, reported, windows=traffic(4))).plan_request is not None


def test_a_plan_of_which_instances_are_lent_is_not_reviewed() -> None:
    desired = deployment()
    due = status(desired)
    lent = {"type": "ScalingLimited", "status": "True", "reason": "GPUsLent"}
    due["conditions"] = [*due["conditions"], {**lent, "message": ""}]
    assert reconcile_plan(view(desired, due, windows=traffic(4))).plan_request is None


def test_an_interval_that_ends_within_a_change_is_a_little_longer() -> None:
    desired = deployment()
    windows = traffic(4, 600, NOW_S - 30) + traffic(8, 30)
    due = status(desired, prediction={"at": format_timestamp(NOW_S - INTERVAL_S), "attainment": 1})
    found = reconcile_plan(view(desired, due, windows=windows))
    assert found.plan_request is None
    assert found.events == ()
    late = {"at": format_timestamp(NOW_S - INTERVAL_S - MAX_DEFERRAL_S), "attainment": 1}
    assert (
        reconcile_plan(
            view(desired, status(desired, prediction=late), windows=windows)
        ).plan_request
        is not None
    )


def test_a_change_is_reported_and_reviewed_at_once() -> None:
    desired = deployment()
    reported = status(desired, prediction={"at": format_timestamp(NOW_S - 100), "attainment": 1})
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    found = reconcile_plan(view(desired, reported, windows=windows))
    assert said(found) == (True, "TrafficChanged")
    assert [event.reason for event in found.events] == ["PlanDrifted"]
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    # Only what came since then is planned for.
    assert found.plan_request.fitted_inputs.workload.rate == pytest.approx(12, rel=0.2)


def test_an_unplanned_change_is_reviewed_again_soon() -> None:
    desired = deployment()
    windows = traffic(4, 600, NOW_S - 150) + traffic(12, 150)
    for age_s, is_due in ((INTERVAL_S / 5, True), (INTERVAL_S / 5 - 2, False)):
        reported = status(
            desired, prediction={"at": format_timestamp(NOW_S - age_s), "attainment": 1}
        )
        assert (
            reconcile_plan(view(desired, reported, windows=windows)).plan_request is not None
        ) is is_due
        calm = reconcile_plan(view(desired, reported, windows=traffic(4)))
        assert calm.plan_request is None


def test_a_change_is_urgent_until_it_has_been_looked_at() -> None:
    desired = deployment()
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    reported = status(desired)
    state = update_drift(DriftState(), desired, reported, windows)
    assert is_urgent(state, resolve_in_cluster(desired), reported)
    assert not is_urgent(DriftState(), resolve_in_cluster(desired), reported)
    looked = {**reported, "prediction": {"at": format_timestamp(NOW_S), "attainment": 1}}
    assert not is_urgent(state, resolve_in_cluster(desired), looked)
    by_hands = deployment(placement=manual_placement(prefill=1, decode=1))
    assert not is_urgent(state, resolve_in_cluster(by_hands), reported)


def test_a_reported_change_is_not_reported_again() -> None:
    desired = deployment()
    said_before = {
        "type": "PlanDrifted",
        "status": "False",
        "reason": "Kept",
        "message": "it stays",
        "lastTransitionTime": format_timestamp(NOW_S - 100),
    }
    reported = status(desired, prediction={"at": format_timestamp(NOW_S), "attainment": 1})
    reported["conditions"].append(said_before)
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    found = reconcile_plan(view(desired, reported, windows=windows))
    assert said(found) == (False, "Kept")
    assert not found.events
    assert found.plan_request is None


def test_nothing_is_submitted_while_the_fleet_changes_or_the_planner_is_busy() -> None:
    desired = deployment()
    reported = status(desired)
    reported["conditions"][0]["status"] = "True"
    assert reconcile_plan(view(desired, reported, windows=traffic(12))).plan_request is None
    reported = status(desired)
    busy = PlanJob("any")
    assert (
        reconcile_plan(
            replace(view(desired, reported, windows=traffic(12)), pending_plan=busy)
        ).plan_request
        is None
    )


def test_what_was_seen_before_the_fleet_settled_does_not_count() -> None:
    desired = deployment()
    windows = traffic(12, 600, NOW_S - 30) + traffic(4, 30)
    assert (
        reconcile_plan(view(desired, status(desired, NOW_S - 30), windows=windows)).plan_request
        is None
    )


def test_traffic_as_planned_waits_until_the_model_can_be_checked() -> None:
    desired = deployment()
    assert reconcile_plan(view(desired, status(desired), windows=ask(4))).plan_request is None
    # What has changed may be too much for what runs, and cannot wait.
    assert reconcile_plan(view(desired, status(desired), windows=ask(12))).plan_request is not None


def test_too_few_requests_say_nothing() -> None:
    desired = deployment()
    assert reconcile_plan(view(desired, status(desired), windows=traffic(0.1))).plan_request is None


@pytest.mark.parametrize(
    "spec",
    [
        {"replan": {"mode": "Off"}},
        {"placement": manual_placement(prefill=1, decode=1)},
        {"paused": True},
        {"model": "org/unheard-of", "engine": {"type": "vLLM"}},
    ],
    ids=["off", "by hand", "paused", "unknown model"],
)
def test_some_plans_do_not_follow_traffic(spec: dict) -> None:
    desired = deployment(**spec)
    assert reconcile_plan(view(desired, status(desired), windows=traffic(12))).plan_request is None


@pytest.mark.parametrize(
    "spec", [{"replan": {"mode": "Advisory"}}, {"planning": {"mode": "Advisory"}}], ids=str
)
def test_in_advisory_mode_a_review_is_submitted(spec: dict) -> None:
    desired = deployment(**spec)
    question = reconcile_plan(view(desired, status(desired), windows=traffic(12))).plan_request
    assert question is not None
    assert question.review is not None
    assert question.review.settings.is_advisory


def test_what_others_scale_is_looked_at_as_it_is_and_not_changed() -> None:
    desired = deployment()
    seen = view(desired, status(desired), windows=traffic(12))
    manual = seen.pools[1].spec.model_copy(update={"owner": "Manual", "replicas": 5})
    pools = (seen.pools[0], seen.pools[1].model_copy(update={"spec": manual}))
    question = reconcile_plan(replace(seen, pools=pools)).plan_request
    assert question is not None
    assert question.review is not None
    assert [pool.replicas for pool in question.review.pools] == [1, 5]


def test_cells_in_one_pod_are_looked_at_as_the_engines_that_they_have() -> None:
    desired = deployment()
    seen = view(desired, status(desired), windows=traffic(12))
    members = [CellMember(role=Role.PREFILL), CellMember(role=Role.DECODE, replicas=3)]
    own = {"role": Role.MIXED, "replicas": 2, "members": members}
    cells = seen.pools[0].model_copy(update={"spec": seen.pools[0].spec.model_copy(update=own)})
    question = reconcile_plan(replace(seen, pools=(cells,))).plan_request
    assert question is not None
    assert question.review is not None
    assert [pool.replicas for pool in question.review.pools] == [2, 6]


def test_a_start_costs_what_the_quickest_took() -> None:
    desired = deployment()
    pods = tuple(
        ObservedPod(f"p{n}", f"u{n}", Role.DECODE, "a", True, created_s=100.0, ready_s=100.0 + took)
        for n, took in enumerate((900.0, 42.0))
    )
    question = reconcile_plan(
        view(desired, status(desired), windows=traffic(12), pods=pods)
    ).plan_request
    assert question is not None
    assert question.review is not None
    assert question.review.settings.start_s == 42


def test_a_correction_counts_for_the_engine_that_it_was_learnt_of() -> None:
    desired = deployment()
    right = LatencyCorrection(
        prefill=2, decode=1.5, of=PlanInputs(resolve_in_cluster(desired), INVENTORY).model_hash
    )
    reported = status(desired, correction=right.model_dump(mode="json"))
    found = reconcile_plan(view(desired, reported, windows=traffic(12)))
    assert found.correction == right
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    assert found.plan_request.fitted_inputs.correction == right
    other = deployment(engine={"type": "Emulated", "emulated": {"timeScale": 2.0}})
    assert (
        reconcile_plan(view(other, {**reported, "plan": plan("x")}, windows=traffic(12))).correction
        is None
    )


def test_a_failed_review_is_reported_and_repeated_later() -> None:
    desired = deployment()
    question = reconcile_plan(view(desired, status(desired), windows=traffic(4))).plan_request
    assert question is not None
    failed = replace(question, faults=("the planner has ended",))
    found = reconcile_plan(view(desired, status(desired), windows=traffic(4), plan_result=failed))
    assert said(found, "PredictionHolds") == (None, "NotCompared")
    assert found.conditions[1].message == "the planner has ended"
    assert found.plan_request is None
    later = replace(
        view(
            desired,
            status(desired),
            windows=traffic(4, end_s=NOW_S + INTERVAL_S),
            plan_result=failed,
        ),
        now_s=NOW_S + INTERVAL_S,
    )
    assert reconcile_plan(later).plan_request is not None


def test_without_declared_traffic_it_is_learnt() -> None:
    desired = deployment(workload=None)
    question = reconcile_plan(view(desired, status(desired), windows=traffic(12))).plan_request
    assert question is not None
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.workload.rate == pytest.approx(12, rel=0.2)


def test_an_unreadable_status_counts_as_none() -> None:
    desired = deployment()
    found = reconcile_plan(
        view(desired, status(desired, basis={"workload": "nonsense"}, correction=7))
    )
    assert found.fitted_inputs is None
    assert found.correction is None
