"""A look at what runs as the planner's process takes it, with the planner itself."""

from dataclasses import replace

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.replan_status import LatencyCorrection
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.replan.planner_process import run_planner
from cleave.controller.replan.reconcile import reconcile_plan
from cleave.planner.replan.revision import ReplanVerdict

from tests.support.deployment_views import ask, deployment, status, traffic, view


def look(asked: LLMDeployment, rate: float) -> PlanJob:
    question = reconcile_plan(view(asked, status(asked), windows=ask(rate))).plan_request
    assert question is not None
    return run_planner(asked.model_dump_json(exclude_none=True), None, question)


@pytest.fixture(scope="module")
def overloaded() -> PlanJob:
    return look(deployment(planning={"maxGPUs": 6}), 60)


def test_a_fleet_that_is_too_small_is_told_to_grow(overloaded: PlanJob) -> None:
    told = overloaded.review_result
    assert told is not None
    assert told.verdict is ReplanVerdict.APPLY
    assert overloaded.plan is not None
    assert sum(pool["replicas"] for pool in overloaded.plan["pools"]) > 2
    assert told.reason in overloaded.plan["reason"]
    # No answer was measured: there was nothing to judge the model by.
    assert told.is_accurate is None
    assert told.prediction.attainment < 0.5


def test_advice_has_the_same_plan(overloaded: PlanJob) -> None:
    advised = look(deployment({"mode": "Advisory"}, planning={"maxGPUs": 6}), 60)
    assert advised.review_result is not None
    assert advised.review_result.verdict is ReplanVerdict.PROPOSE
    assert overloaded.plan is not None
    assert advised.plan is not None
    assert advised.plan["pools"] == overloaded.plan["pools"]


def test_what_runs_is_compared_with_what_it_would_be_planned_as(overloaded: PlanJob) -> None:
    """The plan that was found, running, is the best one."""
    asked = deployment(planning={"maxGPUs": 6})
    told = status(asked)
    assert overloaded.plan is not None
    told["plan"] = {**told["plan"], **overloaded.plan, "inputs": told["plan"]["inputs"]}
    question = reconcile_plan(view(asked, told, windows=ask(60))).plan_request
    assert question is not None
    again = run_planner(asked.model_dump_json(exclude_none=True), None, question)
    assert again.review_result is not None
    assert again.review_result.verdict is ReplanVerdict.KEEP
    assert again.plan is None


def test_what_cannot_be_simulated_is_a_fault() -> None:
    asked = deployment(engine={"type": "vLLM"})
    question = reconcile_plan(view(asked, status(asked), windows=traffic(4))).plan_request
    assert question is not None
    failed = run_planner(asked.model_dump_json(exclude_none=True), None, question)
    assert failed.review_result is None
    assert "no node has GPUs" in failed.faults[0]


def test_a_plan_is_made_for_what_was_seen_with_the_corrected_model() -> None:
    asked = deployment(planning={"maxGPUs": 6})
    question = reconcile_plan(view(asked, status(asked), windows=ask(30))).plan_request
    assert question is not None
    plain = replace(question, review=None)
    text = asked.model_dump_json(exclude_none=True)
    first = run_planner(text, None, plain)
    assert question.fitted_inputs is not None
    slow = LatencyCorrection(prefill=1.5, decode=1.5, of=question.model_hash)
    basis = question.fitted_inputs.model_copy(update={"correction": slow})
    second = run_planner(text, None, replace(plain, fitted_inputs=basis))
    assert first.plan is not None
    assert second.plan is not None
    assert second.plan["gpus"] > first.plan["gpus"]
    assert "corrected by x1.50" in second.plan["predicted"]["trust"]
