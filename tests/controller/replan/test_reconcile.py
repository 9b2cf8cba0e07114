"""When the planner is asked about what runs, and what is said until it answers."""

from dataclasses import replace

import pytest

from cleave.api.replan_status import LatencyCorrection
from cleave.api.role import Role
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.objects import ObservedPod, format_timestamp
from cleave.controller.replan.inputs import PlanInputs
from cleave.controller.replan.reconcile import is_urgent, reconcile_plan, update_drift
from cleave.controller.replan.verdict import ReplanOutcome
from cleave.controller.views import MAX_DEFERRAL_S, DriftState

from tests.support.deployment_views import (
    INTERVAL_S,
    NOW_S,
    THERE,
    ask,
    deployment,
    plan,
    status,
    traffic,
    view,
)
from tests.support.fake_cluster import by_hand


def said(found: ReplanOutcome, kind: str = "PlanDrifted") -> tuple[bool | None, str]:
    condition = next(each for each in found.conditions if each.type == kind)
    return condition.status, condition.reason


def test_traffic_as_planned_is_looked_at_once_in_an_interval() -> None:
    asked = deployment()
    found = reconcile_plan(view(asked, status(asked), windows=traffic(4)))
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
    told = status(
        asked, prediction={"at": format_timestamp(NOW_S - INTERVAL_S + 9), "attainment": 1}
    )
    assert reconcile_plan(view(asked, told, windows=traffic(4))).plan_request is None
    told = status(asked, prediction={"at": format_timestamp(NOW_S - INTERVAL_S), "attainment": 1})
    assert reconcile_plan(view(asked, told, windows=traffic(4))).plan_request is not None


def test_an_interval_that_ends_within_a_change_is_a_little_longer() -> None:
    asked = deployment()
    windows = traffic(4, 600, NOW_S - 30) + traffic(8, 30)
    due = status(asked, prediction={"at": format_timestamp(NOW_S - INTERVAL_S), "attainment": 1})
    found = reconcile_plan(view(asked, due, windows=windows))
    assert found.plan_request is None
    assert found.events == ()
    late = {"at": format_timestamp(NOW_S - INTERVAL_S - MAX_DEFERRAL_S), "attainment": 1}
    assert (
        reconcile_plan(view(asked, status(asked, prediction=late), windows=windows)).plan_request
        is not None
    )


def test_a_change_is_told_and_looked_at_at_once() -> None:
    asked = deployment()
    told = status(asked, prediction={"at": format_timestamp(NOW_S - 100), "attainment": 1})
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    found = reconcile_plan(view(asked, told, windows=windows))
    assert said(found) == (True, "TrafficChanged")
    assert [event.reason for event in found.events] == ["PlanDrifted"]
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    # Only what came since then is planned for.
    assert found.plan_request.fitted_inputs.workload.rate == pytest.approx(12, rel=0.2)


def test_a_change_after_which_the_plan_was_kept_is_looked_at_again_soon() -> None:
    asked = deployment()
    windows = traffic(4, 600, NOW_S - 150) + traffic(12, 150)
    for age_s, is_due in ((INTERVAL_S / 5, True), (INTERVAL_S / 5 - 2, False)):
        told = status(asked, prediction={"at": format_timestamp(NOW_S - age_s), "attainment": 1})
        assert (
            reconcile_plan(view(asked, told, windows=windows)).plan_request is not None
        ) is is_due
        calm = reconcile_plan(view(asked, told, windows=traffic(4)))
        assert calm.plan_request is None


def test_a_change_is_urgent_until_it_has_been_looked_at() -> None:
    asked = deployment()
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    told = status(asked)
    state = update_drift(DriftState(), asked, told, windows)
    assert is_urgent(state, asked, told)
    assert not is_urgent(DriftState(), asked, told)
    looked = {**told, "prediction": {"at": format_timestamp(NOW_S), "attainment": 1}}
    assert not is_urgent(state, asked, looked)
    by_hands = deployment(placement=by_hand(prefill=1, decode=1))
    assert not is_urgent(state, by_hands, told)


def test_a_change_that_was_told_is_not_told_again() -> None:
    asked = deployment()
    said_before = {
        "type": "PlanDrifted",
        "status": "False",
        "reason": "Kept",
        "message": "it stays",
        "lastTransitionTime": format_timestamp(NOW_S - 100),
    }
    told = status(asked, prediction={"at": format_timestamp(NOW_S), "attainment": 1})
    told["conditions"].append(said_before)
    windows = traffic(4, 600, NOW_S - 90) + traffic(12, 90)
    found = reconcile_plan(view(asked, told, windows=windows))
    assert said(found) == (False, "Kept")
    assert not found.events
    assert found.plan_request is None


def test_nothing_is_asked_while_the_fleet_changes_or_the_planner_is_at_work() -> None:
    asked = deployment()
    told = status(asked)
    told["conditions"][0]["status"] = "True"
    assert reconcile_plan(view(asked, told, windows=traffic(12))).plan_request is None
    told = status(asked)
    busy = PlanJob("any")
    assert (
        reconcile_plan(
            replace(view(asked, told, windows=traffic(12)), pending_plan=busy)
        ).plan_request
        is None
    )


def test_what_was_seen_before_the_fleet_settled_does_not_count() -> None:
    asked = deployment()
    windows = traffic(12, 600, NOW_S - 30) + traffic(4, 30)
    assert (
        reconcile_plan(view(asked, status(asked, NOW_S - 30), windows=windows)).plan_request is None
    )


def test_what_is_as_planned_waits_until_the_model_can_be_judged() -> None:
    asked = deployment()
    assert reconcile_plan(view(asked, status(asked), windows=ask(4))).plan_request is None
    # What has changed may be too much for what runs, and cannot wait.
    assert reconcile_plan(view(asked, status(asked), windows=ask(12))).plan_request is not None


def test_too_few_requests_say_nothing() -> None:
    asked = deployment()
    assert reconcile_plan(view(asked, status(asked), windows=traffic(0.1))).plan_request is None


@pytest.mark.parametrize(
    "spec",
    [
        {"replan": {"mode": "Off"}},
        {"placement": by_hand(prefill=1, decode=1)},
        {"paused": True},
        {"model": "org/unheard-of", "engine": {"type": "vLLM"}},
    ],
    ids=["off", "by hand", "paused", "unknown model"],
)
def test_some_plans_do_not_follow_traffic(spec: dict) -> None:
    asked = deployment(**spec)
    assert reconcile_plan(view(asked, status(asked), windows=traffic(12))).plan_request is None


@pytest.mark.parametrize(
    "spec", [{"replan": {"mode": "Advisory"}}, {"planning": {"mode": "Advisory"}}], ids=str
)
def test_advice_is_asked_for_where_nothing_is_to_be_applied(spec: dict) -> None:
    asked = deployment(**spec)
    question = reconcile_plan(view(asked, status(asked), windows=traffic(12))).plan_request
    assert question is not None
    assert question.review is not None
    assert question.review.settings.is_advisory


def test_what_others_scale_is_looked_at_as_it_is_and_not_changed() -> None:
    asked = deployment()
    seen = view(asked, status(asked), windows=traffic(12))
    manual = seen.pools[1].spec.model_copy(update={"owner": "Manual", "replicas": 5})
    pools = (seen.pools[0], seen.pools[1].model_copy(update={"spec": manual}))
    question = reconcile_plan(replace(seen, pools=pools)).plan_request
    assert question is not None
    assert question.review is not None
    assert [pool.replicas for pool in question.review.pools] == [1, 5]


def test_a_start_costs_what_the_quickest_took() -> None:
    asked = deployment()
    pods = tuple(
        ObservedPod(f"p{n}", f"u{n}", Role.DECODE, "a", True, created_s=100.0, ready_s=100.0 + took)
        for n, took in enumerate((900.0, 42.0))
    )
    question = reconcile_plan(
        view(asked, status(asked), windows=traffic(12), pods=pods)
    ).plan_request
    assert question is not None
    assert question.review is not None
    assert question.review.settings.start_s == 42


def test_a_correction_counts_for_the_engine_that_it_was_learnt_of() -> None:
    asked = deployment()
    right = LatencyCorrection(prefill=2, decode=1.5, of=PlanInputs(asked, THERE).model_hash)
    told = status(asked, correction=right.model_dump(mode="json"))
    found = reconcile_plan(view(asked, told, windows=traffic(12)))
    assert found.correction == right
    assert found.plan_request is not None
    assert found.plan_request.fitted_inputs is not None
    assert found.plan_request.fitted_inputs.correction == right
    other = deployment(engine={"type": "Emulated", "emulated": {"timeScale": 2.0}})
    assert (
        reconcile_plan(view(other, {**told, "plan": plan("x")}, windows=traffic(12))).correction
        is None
    )


def test_a_look_that_failed_is_told_and_taken_again_later() -> None:
    asked = deployment()
    question = reconcile_plan(view(asked, status(asked), windows=traffic(4))).plan_request
    assert question is not None
    failed = replace(question, faults=("the planner has ended",))
    found = reconcile_plan(view(asked, status(asked), windows=traffic(4), plan_result=failed))
    assert said(found, "PredictionHolds") == (None, "NotCompared")
    assert found.conditions[1].message == "the planner has ended"
    assert found.plan_request is None
    later = replace(
        view(
            asked, status(asked), windows=traffic(4, end_s=NOW_S + INTERVAL_S), plan_result=failed
        ),
        now_s=NOW_S + INTERVAL_S,
    )
    assert reconcile_plan(later).plan_request is not None


def test_without_stated_traffic_it_is_learnt() -> None:
    asked = deployment(workload=None)
    question = reconcile_plan(view(asked, status(asked), windows=traffic(12))).plan_request
    assert question is not None
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.workload.rate == pytest.approx(12, rel=0.2)


def test_a_status_that_nobody_can_read_is_taken_for_none() -> None:
    asked = deployment()
    found = reconcile_plan(view(asked, status(asked, basis={"workload": "nonsense"}, correction=7)))
    assert found.fitted_inputs is None
    assert found.correction is None
