"""What a verdict comes to: plans, advice, corrections, and what is told of them, once."""

from dataclasses import replace
from typing import Any

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.actions import Apply, Emit, PatchStatus, PlanJob, RequestPlan
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.replan.reconcile import reconcile_plan
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.planner.replan.revision import ReplanVerdict

from tests.support.deployment_views import MORE, NOW_S, deployment, reviewed, status, traffic, view

CHANGED = traffic(4, 600, NOW_S - 90) + traffic(12, 90)


def answered(asked: LLMDeployment, verdict: ReplanVerdict, **answer: Any) -> DeploymentView:
    """The deployment when the planner has just answered."""
    before = view(asked, status(asked), windows=CHANGED)
    question = reconcile_plan(before).plan_request
    assert question is not None
    return replace(before, plan_result=reviewed(question, verdict, asked, **answer))


def written(seen: DeploymentView) -> Manifest:
    (told,) = [each.status for each in reconcile(seen) if isinstance(each, PatchStatus)]
    return told


def reasons(seen: DeploymentView) -> list[str]:
    return [each.reason for each in reconcile(seen) if isinstance(each, Emit)]


def conditions(told: Manifest) -> dict[str, tuple[str, str]]:
    return {each["type"]: (each["status"], each["reason"]) for each in told["conditions"]}


def replicas(seen: DeploymentView) -> dict[str, int]:
    """Of the pools that are written."""
    applied = [each.manifest for each in reconcile(seen) if isinstance(each, Apply)]
    pools = [each for each in applied if each["kind"] == "InstancePool"]
    return {each["spec"]["role"]: each["spec"]["replicas"] for each in pools}


def test_a_better_plan_takes_the_place_of_what_runs() -> None:
    seen = answered(deployment(), ReplanVerdict.APPLY, pools=MORE)
    told = written(seen)
    assert told["plan"]["pools"] == MORE
    assert told["basis"]["workload"]["rate"] > 8
    assert replicas(seen)["decode"] == 3
    assert "Replanned" in reasons(seen)
    (past,) = told["plans"]
    assert (past["verdict"], past["pools"]) == ("Applied", MORE)
    assert [pool["replicas"] for pool in past["left"]] == [1, 1]
    assert conditions(told)["PlanDrifted"] == ("False", "Replanned")
    assert conditions(told)["PlanReady"] == ("True", "Planned")


def test_a_plan_that_was_applied_stays_without_being_asked_for_again() -> None:
    asked = deployment()
    seen = answered(asked, ReplanVerdict.APPLY, pools=MORE)
    told = written(seen)
    # The same operator with the same answer, and one that starts anew.
    for outcome in (seen.plan_result, None):
        later = replace(view(asked, told), plan_result=outcome)
        actions = reconcile(later)
        assert not [each for each in actions if isinstance(each, RequestPlan)]
        assert not [
            each for each in actions if isinstance(each, Emit) if each.reason == "Replanned"
        ]
        kept = [each.status for each in actions if isinstance(each, PatchStatus)]
        assert all(each["plan"] == told["plan"] for each in kept)
        assert all(each["plans"] == told["plans"] for each in kept)


def test_an_edit_of_the_stated_traffic_is_planned_for() -> None:
    told = written(answered(deployment(), ReplanVerdict.APPLY, pools=MORE))
    edited = deployment(
        workload={**deployment().spec.workload.model_dump(by_alias=True), "rate": 9}
    )
    questions = [
        each.job for each in reconcile(view(edited, told)) if isinstance(each, RequestPlan)
    ]
    assert [question.fitted_inputs for question in questions] == [None]
    assert questions[0].review is None


def test_an_edit_of_something_else_is_planned_for_the_traffic_that_was_seen() -> None:
    told = written(answered(deployment(), ReplanVerdict.APPLY, pools=MORE))
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    (question,) = [e.job for e in reconcile(view(edited, told)) if isinstance(e, RequestPlan)]
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.workload.rate == told["basis"]["workload"]["rate"]


def test_a_model_that_is_wrong_is_corrected_and_nothing_is_changed() -> None:
    seen = answered(deployment(), ReplanVerdict.CORRECT, holds=False, decode=2.0)
    told = written(seen)
    assert told["correction"]["decode"] == 2
    assert told["plan"] == seen.status["plan"]
    assert "basis" not in told
    assert conditions(told)["PredictionHolds"] == ("False", "Wrong")
    assert "ModelCorrected" in reasons(seen)
    assert not replicas(seen) or replicas(seen)["decode"] == 1
    (past,) = told["plans"]
    assert past["verdict"] == "Corrected"


def test_a_corrected_model_is_looked_at_again_soon() -> None:
    asked = deployment()
    told = written(answered(asked, ReplanVerdict.CORRECT, holds=False, decode=2.0))
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    soon = replace(view(asked, told, windows=CHANGED), now_s=NOW_S + 59)
    assert reconcile_plan(soon).plan_request is None
    question = reconcile_plan(replace(soon, now_s=NOW_S + 61)).plan_request
    assert question is not None
    assert question.fitted_inputs is not None
    assert question.fitted_inputs.correction is not None
    assert question.fitted_inputs.correction.decode == 2


def test_corrections_in_a_row_are_one_entry() -> None:
    asked = deployment()
    first = answered(asked, ReplanVerdict.CORRECT, holds=False, decode=2.0)
    told = written(first)
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    later = replace(view(asked, told, windows=CHANGED), now_s=NOW_S + 61)
    question = reconcile_plan(later).plan_request
    assert question is not None
    again = reviewed(question, ReplanVerdict.CORRECT, asked, holds=False, decode=3.0)
    assert len(written(replace(later, plan_result=again))["plans"]) == 1


def test_advice_is_told_once_and_changes_nothing() -> None:
    asked = deployment({"mode": "Advisory"})
    seen = answered(asked, ReplanVerdict.PROPOSE, pools=MORE)
    told = written(seen)
    assert told["advice"]["pools"] == MORE
    assert told["plan"] == seen.status["plan"]
    assert conditions(told)["PlanDrifted"] == ("True", "Proposed")
    assert "PlanProposed" in reasons(seen)
    assert "decode" not in replicas(seen) or replicas(seen)["decode"] == 1
    later = view(asked, told)
    assert reconcile_plan(later).advice == told["advice"]
    assert "PlanProposed" not in reasons(later)


def test_where_all_plans_are_advice_it_follows_the_traffic() -> None:
    asked = deployment(planning={"mode": "Advisory"})
    told = written(answered(asked, ReplanVerdict.PROPOSE, pools=MORE))
    assert told["advice"]["pools"] == MORE
    assert conditions(told)["PlanReady"] == ("True", "Advised")
    assert written_again(asked, told)["advice"]["pools"] == MORE


def written_again(asked: LLMDeployment, told: Manifest) -> Manifest:
    """The status after an operator has started anew."""
    found = [each.status for each in reconcile(view(asked, told)) if isinstance(each, PatchStatus)]
    return found[0] if found else told


def test_what_runs_stays_where_nothing_is_better_and_that_is_told() -> None:
    asked = deployment()
    seen = answered(asked, ReplanVerdict.KEEP)
    told = written(seen)
    assert told["plan"] == seen.status["plan"]
    assert conditions(told)["PlanDrifted"] == ("False", "Kept")
    assert "PlanKept" in reasons(seen)
    assert "plans" not in told
    # The same change is not news any more.
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    assert "PlanDrifted" not in reasons(view(asked, told, windows=CHANGED))


def test_an_answer_about_another_spec_does_not_count() -> None:
    seen = answered(deployment(), ReplanVerdict.APPLY, pools=MORE)
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    told = written(replace(seen, deployment=edited))
    assert told["plan"] == seen.status["plan"]
    assert "basis" not in told


def test_at_most_ten_entries_are_kept() -> None:
    asked = deployment()
    past = {"at": "2026-01-01T00:00:00Z", "verdict": "Proposed", "reason": "x"}
    before = view(asked, status(asked, plans=[past] * 10), windows=CHANGED)
    question = reconcile_plan(before).plan_request
    assert isinstance(question, PlanJob)
    outcome = reviewed(question, ReplanVerdict.APPLY, asked, pools=MORE)
    assert len(written(replace(before, plan_result=outcome))["plans"]) == 10


def test_without_stated_traffic_what_was_seen_is_planned_for() -> None:
    asked = deployment(workload=None)
    before = view(asked, status(asked), windows=traffic(12))
    question = reconcile_plan(before).plan_request
    assert question is not None
    seen = replace(before, plan_result=reviewed(question, ReplanVerdict.APPLY, asked, pools=MORE))
    told = written(seen)
    assert told["plan"]["pools"] == MORE
    assert conditions(told)["PlanReady"] == ("True", "Planned")
    assert replicas(seen)["decode"] == 3
    # And so it stays.
    again = view(asked, told)
    assert "decode" not in replicas(again) or replicas(again)["decode"] == 3
    assert not [each for each in reconcile(again) if isinstance(each, RequestPlan)]
