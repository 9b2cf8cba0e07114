"""A look at what runs as the planner's process takes it, with the planner itself."""

from dataclasses import replace

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.replan_status import LatencyCorrection
from cleave.controller.cluster.actions import PlanOutcome
from cleave.controller.replan.planner_process import answer
from cleave.controller.replan.reconcile import turn
from cleave.planner.replan.revision import Verdict

from tests.support.deployment_views import ask, deployment, status, traffic, view


def look(asked: LLMDeployment, rate: float) -> PlanOutcome:
    question = turn(view(asked, status(asked), windows=ask(rate))).question
    assert question is not None
    return answer(asked.model_dump_json(exclude_none=True), None, question)


@pytest.fixture(scope="module")
def overloaded() -> PlanOutcome:
    return look(deployment(planning={"maxGPUs": 6}), 60)


def test_a_fleet_that_is_too_small_is_told_to_grow(overloaded: PlanOutcome) -> None:
    told = overloaded.reviewed
    assert told is not None
    assert told.verdict is Verdict.APPLY
    assert overloaded.plan is not None
    assert sum(pool["replicas"] for pool in overloaded.plan["pools"]) > 2
    assert told.reason in overloaded.plan["reason"]
    # No answer was measured: there was nothing to judge the model by.
    assert told.holds is None
    assert told.prediction.attainment < 0.5


def test_advice_has_the_same_plan(overloaded: PlanOutcome) -> None:
    advised = look(deployment({"mode": "Advisory"}, planning={"maxGPUs": 6}), 60)
    assert advised.reviewed is not None
    assert advised.reviewed.verdict is Verdict.PROPOSE
    assert overloaded.plan is not None
    assert advised.plan is not None
    assert advised.plan["pools"] == overloaded.plan["pools"]


def test_what_runs_is_compared_with_what_it_would_be_planned_as(overloaded: PlanOutcome) -> None:
    """The plan that was found, running, is the best one."""
    asked = deployment(planning={"maxGPUs": 6})
    told = status(asked)
    assert overloaded.plan is not None
    told["plan"] = {**told["plan"], **overloaded.plan, "inputs": told["plan"]["inputs"]}
    question = turn(view(asked, told, windows=ask(60))).question
    assert question is not None
    again = answer(asked.model_dump_json(exclude_none=True), None, question)
    assert again.reviewed is not None
    assert again.reviewed.verdict is Verdict.KEEP
    assert again.plan is None


def test_what_cannot_be_simulated_is_a_fault() -> None:
    asked = deployment(engine={"type": "vLLM"})
    question = turn(view(asked, status(asked), windows=traffic(4))).question
    assert question is not None
    failed = answer(asked.model_dump_json(exclude_none=True), None, question)
    assert failed.reviewed is None
    assert "no node has GPUs" in failed.faults[0]


def test_a_plan_is_made_for_what_was_seen_with_the_corrected_model() -> None:
    asked = deployment(planning={"maxGPUs": 6})
    question = turn(view(asked, status(asked), windows=ask(30))).question
    assert question is not None
    plain = replace(question, review=None)
    text = asked.model_dump_json(exclude_none=True)
    first = answer(text, None, plain)
    assert question.basis is not None
    slow = LatencyCorrection(prefill=1.5, decode=1.5, of=question.model_digest)
    basis = question.basis.model_copy(update={"correction": slow})
    second = answer(text, None, replace(plain, basis=basis))
    assert first.plan is not None
    assert second.plan is not None
    assert second.plan["gpus"] > first.plan["gpus"]
    assert "corrected by x1.50" in second.plan["predicted"]["trust"]
