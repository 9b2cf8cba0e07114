"""What a verdict comes to: plans, advice, corrections, and what is told of them, once."""

from dataclasses import replace
from typing import Any

from cleave.api.deployment import LLMDeployment
from cleave.controller.cluster.actions import Apply, Ask, Emit, PatchStatus, PlanOutcome
from cleave.controller.deployment.reconcile import DeploymentView, reconcile
from cleave.controller.replan.reconcile import turn
from cleave.manifests.labels import Manifest
from cleave.planner.replan.revision import Verdict

from tests.support.deployment_views import MORE, NOW_S, deployment, reviewed, status, traffic, view

CHANGED = traffic(4, 600, NOW_S - 90) + traffic(12, 90)


def answered(asked: LLMDeployment, verdict: Verdict, **answer: Any) -> DeploymentView:
    """The deployment when the planner has just answered."""
    before = view(asked, status(asked), windows=CHANGED)
    question = turn(before).question
    assert question is not None
    return replace(before, outcome=reviewed(question, verdict, asked, **answer))


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
    seen = answered(deployment(), Verdict.APPLY, pools=MORE)
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
    seen = answered(asked, Verdict.APPLY, pools=MORE)
    told = written(seen)
    # The same operator with the same answer, and one that starts anew.
    for outcome in (seen.outcome, None):
        later = replace(view(asked, told), outcome=outcome)
        actions = reconcile(later)
        assert not [each for each in actions if isinstance(each, Ask)]
        assert not [
            each for each in actions if isinstance(each, Emit) if each.reason == "Replanned"
        ]
        kept = [each.status for each in actions if isinstance(each, PatchStatus)]
        assert all(each["plan"] == told["plan"] for each in kept)
        assert all(each["plans"] == told["plans"] for each in kept)


def test_an_edit_of_the_stated_traffic_is_planned_for() -> None:
    told = written(answered(deployment(), Verdict.APPLY, pools=MORE))
    edited = deployment(
        workload={**deployment().spec.workload.model_dump(by_alias=True), "rate": 9}
    )
    questions = [each.question for each in reconcile(view(edited, told)) if isinstance(each, Ask)]
    assert [question.basis for question in questions] == [None]
    assert questions[0].review is None


def test_an_edit_of_something_else_is_planned_for_the_traffic_that_was_seen() -> None:
    told = written(answered(deployment(), Verdict.APPLY, pools=MORE))
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    (question,) = [e.question for e in reconcile(view(edited, told)) if isinstance(e, Ask)]
    assert question.basis is not None
    assert question.basis.workload.rate == told["basis"]["workload"]["rate"]


def test_a_model_that_is_wrong_is_corrected_and_nothing_is_changed() -> None:
    seen = answered(deployment(), Verdict.CORRECT, holds=False, decode=2.0)
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
    told = written(answered(asked, Verdict.CORRECT, holds=False, decode=2.0))
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    soon = replace(view(asked, told, windows=CHANGED), now_s=NOW_S + 59)
    assert turn(soon).question is None
    question = turn(replace(soon, now_s=NOW_S + 61)).question
    assert question is not None
    assert question.basis is not None
    assert question.basis.correction is not None
    assert question.basis.correction.decode == 2


def test_corrections_in_a_row_are_one_entry() -> None:
    asked = deployment()
    first = answered(asked, Verdict.CORRECT, holds=False, decode=2.0)
    told = written(first)
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    later = replace(view(asked, told, windows=CHANGED), now_s=NOW_S + 61)
    question = turn(later).question
    assert question is not None
    again = reviewed(question, Verdict.CORRECT, asked, holds=False, decode=3.0)
    assert len(written(replace(later, outcome=again))["plans"]) == 1


def test_advice_is_told_once_and_changes_nothing() -> None:
    asked = deployment({"mode": "Advisory"})
    seen = answered(asked, Verdict.PROPOSE, pools=MORE)
    told = written(seen)
    assert told["advice"]["pools"] == MORE
    assert told["plan"] == seen.status["plan"]
    assert conditions(told)["PlanDrifted"] == ("True", "Proposed")
    assert "PlanProposed" in reasons(seen)
    assert "decode" not in replicas(seen) or replicas(seen)["decode"] == 1
    later = view(asked, told)
    assert turn(later).advice == told["advice"]
    assert "PlanProposed" not in reasons(later)


def test_where_all_plans_are_advice_it_follows_the_traffic() -> None:
    asked = deployment(planning={"mode": "Advisory"})
    told = written(answered(asked, Verdict.PROPOSE, pools=MORE))
    assert told["advice"]["pools"] == MORE
    assert conditions(told)["PlanReady"] == ("True", "Advised")
    assert written_again(asked, told)["advice"]["pools"] == MORE


def written_again(asked: LLMDeployment, told: Manifest) -> Manifest:
    """The status after an operator has started anew."""
    found = [each.status for each in reconcile(view(asked, told)) if isinstance(each, PatchStatus)]
    return found[0] if found else told


def test_what_runs_stays_where_nothing_is_better_and_that_is_told() -> None:
    asked = deployment()
    seen = answered(asked, Verdict.KEEP)
    told = written(seen)
    assert told["plan"] == seen.status["plan"]
    assert conditions(told)["PlanDrifted"] == ("False", "Kept")
    assert "PlanKept" in reasons(seen)
    assert "plans" not in told
    # The same change is not news any more.
    told["conditions"][:] = [*status(asked)["conditions"], *told["conditions"][-2:]]
    assert "PlanDrifted" not in reasons(view(asked, told, windows=CHANGED))


def test_an_answer_about_another_spec_does_not_count() -> None:
    seen = answered(deployment(), Verdict.APPLY, pools=MORE)
    edited = deployment(slo={"ttftMs": 200, "tpotMs": 20})
    told = written(replace(seen, deployment=edited))
    assert told["plan"] == seen.status["plan"]
    assert "basis" not in told


def test_at_most_ten_entries_are_kept() -> None:
    asked = deployment()
    past = {"at": "2026-01-01T00:00:00Z", "verdict": "Proposed", "reason": "x"}
    before = view(asked, status(asked, plans=[past] * 10), windows=CHANGED)
    question = turn(before).question
    assert isinstance(question, PlanOutcome)
    outcome = reviewed(question, Verdict.APPLY, asked, pools=MORE)
    assert len(written(replace(before, outcome=outcome))["plans"]) == 10


def test_without_stated_traffic_what_was_seen_is_planned_for() -> None:
    asked = deployment(workload=None)
    before = view(asked, status(asked), windows=traffic(12))
    question = turn(before).question
    assert question is not None
    seen = replace(before, outcome=reviewed(question, Verdict.APPLY, asked, pools=MORE))
    told = written(seen)
    assert told["plan"]["pools"] == MORE
    assert conditions(told)["PlanReady"] == ("True", "Planned")
    assert replicas(seen)["decode"] == 3
    # And so it stays.
    again = view(asked, told)
    assert "decode" not in replicas(again) or replicas(again)["decode"] == 3
    assert not [each for each in reconcile(again) if isinstance(each, Ask)]
