"""Effects of a verdict: plans, advice, corrections, and one event for each."""

from dataclasses import replace
from typing import Any

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.actions import Apply, Emit, PatchStatus, PlanJob, RequestPlan
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.replan.reconcile import reconcile_plan
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.planner.replan.revision import ReplanVerdict
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.deployment_views import MORE, NOW_S, deployment, reviewed, status, traffic, view

CHANGED = traffic(4, 600, NOW_S - 90) + traffic(12, 90)


def answered(desired: LLMDeployment, verdict: ReplanVerdict, **answer: Any) -> DeploymentView:
    """The deployment when the planner has just answered."""
    before = view(desired, status(desired), windows=CHANGED)
    question = reconcile_plan(before).plan_request
    assert question is not None
    return replace(before, plan_result=reviewed(question, verdict, desired, **answer))


def written(seen: DeploymentView) -> Manifest:
    (reported,) = [each.status for each in reconcile(seen) if isinstance(each, PatchStatus)]
    return reported


def reasons(seen: DeploymentView) -> list[str]:
    return [each.reason for each in reconcile(seen) if isinstance(each, Emit)]


def conditions(reported: Manifest) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in reported["conditions"]}


def replicas(seen: DeploymentView) -> dict[str, int]:
    """Of the pools that are written."""
    applied = [each.manifest for each in reconcile(seen) if isinstance(each, Apply)]
    pools = [each for each in applied if each["kind"] == "InstancePool"]
    return {each["spec"]["role"]: each["spec"]["replicas"] for each in pools}


def test_a_better_plan_takes_the_place_of_what_runs() -> None:
    seen = answered(deployment(), ReplanVerdict.APPLY, pools=MORE)
    reported = written(seen)
    assert reported["plan"]["pools"] == MORE
    assert reported["basis"]["workload"]["rate"] > 8
    assert replicas(seen)["decode"] == 3
    assert "Replanned" in reasons(seen)
    (past,) = reported["plans"]
    assert (past["verdict"], past["pools"]) == ("Applied", MORE)
    assert [pool["replicas"] for pool in past["left"]] == [1, 1]
    assert conditions(reported)["PlanDrifted"] == ("False", "Replanned")
    assert conditions(reported)["PlanReady"] == ("True", "Planned")


def test_an_applied_plan_stays_without_another_planner_call() -> None:
    desired = deployment()
    seen = answered(desired, ReplanVerdict.APPLY, pools=MORE)
    reported = written(seen)
    # The same operator with the same answer, and one that starts anew.
    for outcome in (seen.plan_result, None):
        later = replace(view(desired, reported), plan_result=outcome)
        actions = reconcile(later)
        assert not [each for each in actions if isinstance(each, RequestPlan)]
        assert not [
            each for each in actions if isinstance(each, Emit) if each.reason == "Replanned"
        ]
        unchanged = [each.status for each in actions if isinstance(each, PatchStatus)]
        assert all(each["plan"] == reported["plan"] for each in unchanged)
        assert all(each["plans"] == reported["plans"] for each in unchanged)


def test_an_edit_of_the_declared_traffic_is_planned_for() -> None:
    reported = written(answered(deployment(), ReplanVerdict.APPLY, pools=MORE))
    edited = deployment(
        workload={**deployment().spec.workload.model_dump(by_alias=True), "rate": 9}
    )
    questions = [
        each.job for each in reconcile(view(edited, reported)) if isinstance(each, RequestPlan)
    ]
    assert [question.fitted_inputs for question in questions] == [None]
    assert questions[0].review is None


def test_an_edit_of_something_else_is_planned_for_the_traffic_that_was_seen() -> None:
    reported = written(answered(deployment(), ReplanVerdict.APPLY, pools=MORE))
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    (question,) = [e.job for e in reconcile(view(edited, reported)) if isinstance(e, RequestPlan)]
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.workload.rate == reported["basis"]["workload"]["rate"]


def test_a_model_that_is_wrong_is_corrected_and_nothing_is_changed() -> None:
    seen = answered(deployment(), ReplanVerdict.CORRECT, holds=False, decode=2.0)
    reported = written(seen)
    assert reported["correction"]["decode"] == 2
    assert reported["plan"] == seen.status["plan"]
    assert "basis" not in reported
    assert conditions(reported)["PredictionHolds"] == ("False", "Wrong")
    assert "ModelCorrected" in reasons(seen)
    assert not replicas(seen) or replicas(seen)["decode"] == 1
    (past,) = reported["plans"]
    assert past["verdict"] == "Corrected"


def test_a_corrected_model_is_looked_at_again_soon() -> None:
    desired = deployment()
    reported = written(answered(desired, ReplanVerdict.CORRECT, holds=False, decode=2.0))
    reported["conditions"][:] = [*status(desired)["conditions"], *reported["conditions"][-2:]]
    soon = replace(view(desired, reported, windows=CHANGED), now_s=NOW_S + 59)
    assert reconcile_plan(soon).plan_request is None
    question = reconcile_plan(replace(soon, now_s=NOW_S + 61)).plan_request
    assert question is not None
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.correction is not None
    assert question.fitted_inputs.correction.decode == 2


def test_corrections_in_a_row_are_one_entry() -> None:
    desired = deployment()
    first = answered(desired, ReplanVerdict.CORRECT, holds=False, decode=2.0)
    reported = written(first)
    reported["conditions"][:] = [*status(desired)["conditions"], *reported["conditions"][-2:]]
    later = replace(view(desired, reported, windows=CHANGED), now_s=NOW_S + 61)
    question = reconcile_plan(later).plan_request
    assert question is not None
    again = reviewed(question, ReplanVerdict.CORRECT, desired, holds=False, decode=3.0)
    assert len(written(replace(later, plan_result=again))["plans"]) == 1


def test_advice_is_reported_once_and_changes_nothing() -> None:
    desired = deployment({"mode": "Advisory"})
    seen = answered(desired, ReplanVerdict.PROPOSE, pools=MORE)
    reported = written(seen)
    assert reported["advice"]["pools"] == MORE
    assert reported["plan"] == seen.status["plan"]
    assert conditions(reported)["PlanDrifted"] == ("True", "Proposed")
    assert "PlanProposed" in reasons(seen)
    assert "decode" not in replicas(seen) or replicas(seen)["decode"] == 1
    later = view(desired, reported)
    assert reconcile_plan(later).advice == reported["advice"]
    assert "PlanProposed" not in reasons(later)


def test_where_all_plans_are_advice_it_follows_the_traffic() -> None:
    desired = deployment(planning={"mode": "Advisory"})
    reported = written(answered(desired, ReplanVerdict.PROPOSE, pools=MORE))
    assert reported["advice"]["pools"] == MORE
    assert conditions(reported)["PlanReady"] == ("True", "Advised")
    assert written_again(desired, reported)["advice"]["pools"] == MORE


def written_again(desired: LLMDeployment, reported: Manifest) -> Manifest:
    """The status after an operator has started anew."""
    found = [
        each.status for each in reconcile(view(desired, reported)) if isinstance(each, PatchStatus)
    ]
    return found[0] if found else reported


def test_the_running_plan_stays_when_none_is_better_and_that_is_reported() -> None:
    desired = deployment()
    seen = answered(desired, ReplanVerdict.KEEP)
    reported = written(seen)
    assert reported["plan"] == seen.status["plan"]
    assert conditions(reported)["PlanDrifted"] == ("False", "Kept")
    assert "PlanKept" in reasons(seen)
    assert "plans" not in reported
    # The same change is not news any more.
    reported["conditions"][:] = [*status(desired)["conditions"], *reported["conditions"][-2:]]
    assert "PlanDrifted" not in reasons(view(desired, reported, windows=CHANGED))


def test_an_answer_about_another_spec_does_not_count() -> None:
    seen = answered(deployment(), ReplanVerdict.APPLY, pools=MORE)
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    reported = written(replace(seen, resolved=resolve_in_cluster(edited)))
    assert reported["plan"] == seen.status["plan"]
    assert "basis" not in reported


def test_at_most_ten_entries_are_kept() -> None:
    desired = deployment()
    past = {"at": "2026-01-01T00:00:00Z", "verdict": "Proposed", "reason": "x"}
    before = view(desired, status(desired, plans=[past] * 10), windows=CHANGED)
    question = reconcile_plan(before).plan_request
    assert isinstance(question, PlanJob)
    outcome = reviewed(question, ReplanVerdict.APPLY, desired, pools=MORE)
    assert len(written(replace(before, plan_result=outcome))["plans"]) == 10


def test_without_declared_traffic_the_observed_one_is_planned_for() -> None:
    desired = deployment(workload=None)
    before = view(desired, status(desired), windows=traffic(12))
    question = reconcile_plan(before).plan_request
    assert question is not None
    seen = replace(before, plan_result=reviewed(question, ReplanVerdict.APPLY, desired, pools=MORE))
    reported = written(seen)
    assert reported["plan"]["pools"] == MORE
    assert conditions(reported)["PlanReady"] == ("True", "Planned")
    assert replicas(seen)["decode"] == 3
    # And so it stays.
    again = view(desired, reported)
    assert "decode" not in replicas(again) or replicas(again)["decode"] == 3
    assert not [each for each in reconcile(again) if isinstance(each, RequestPlan)]
