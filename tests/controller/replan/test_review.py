"""A look at what runs as the planner's process takes it, with the planner itself."""

from dataclasses import replace

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.replan_status import LatencyCorrection
from cleave.controller.cluster.actions import PlanJob
from cleave.controller.cluster.inventory import PlanMachines
from cleave.controller.replan import review
from cleave.controller.replan.planner_process import run_planner
from cleave.controller.replan.reconcile import reconcile_plan
from cleave.planner.placement import PlanError
from cleave.planner.replan.revision import ReplanVerdict

from tests.support.deployment_views import ask, deployment, status, traffic, view


def look(desired: LLMDeployment, rate: float) -> PlanJob:
    question = reconcile_plan(view(desired, status(desired), windows=ask(rate))).plan_request
    assert question is not None
    return run_planner(desired.model_dump_json(exclude_none=True), PlanMachines(None), question)


@pytest.fixture(scope="module")
def overloaded() -> PlanJob:
    return look(deployment(planning={"maxGPUs": 6}), 60)


def test_a_fleet_that_is_too_small_is_enlarged(overloaded: PlanJob) -> None:
    result = overloaded.review_result
    assert result is not None
    assert result.verdict is ReplanVerdict.APPLY
    assert overloaded.plan is not None
    assert sum(pool["replicas"] for pool in overloaded.plan["pools"]) > 2
    assert result.reason in overloaded.plan["reason"]
    # No answer was measured: the model cannot be checked.
    assert result.is_accurate is None
    assert result.prediction.attainment < 0.5


def test_advice_has_the_same_plan(overloaded: PlanJob) -> None:
    advised = look(deployment({"mode": "Advisory"}, planning={"maxGPUs": 6}), 60)
    assert advised.review_result is not None
    assert advised.review_result.verdict is ReplanVerdict.PROPOSE
    assert overloaded.plan is not None
    assert advised.plan is not None
    assert advised.plan["pools"] == overloaded.plan["pools"]


def test_what_runs_is_compared_with_what_it_would_be_planned_as(overloaded: PlanJob) -> None:
    """The plan that was found, running, is the best one."""
    desired = deployment(planning={"maxGPUs": 6})
    result = status(desired)
    assert overloaded.plan is not None
    result["plan"] = {**result["plan"], **overloaded.plan, "inputs": result["plan"]["inputs"]}
    question = reconcile_plan(view(desired, result, windows=ask(60))).plan_request
    assert question is not None
    again = run_planner(desired.model_dump_json(exclude_none=True), PlanMachines(None), question)
    assert again.review_result is not None
    assert again.review_result.verdict is ReplanVerdict.KEEP
    assert again.plan is None


def test_the_threshold_that_gateways_apply_is_simulated(monkeypatch) -> None:
    """Not the plan's, which gateways of an earlier version do not get."""
    simulated = []

    def record(problem, running_plan, *_) -> None:
        simulated.append(running_plan.whole_below_tokens)
        raise PlanError(["enough"])

    monkeypatch.setattr(review, "revise", record)
    desired = deployment(planning={"maxGPUs": 6})
    planned = status(desired)
    planned["plan"]["wholeBelowTokens"] = 512
    for tokens in (0, 256):
        windows = tuple(replace(each, whole_below_tokens=tokens) for each in ask(60))
        job = reconcile_plan(view(desired, planned, windows=windows)).plan_request
        assert job is not None
        run_planner(desired.model_dump_json(exclude_none=True), PlanMachines(None), job)
    assert simulated == [0, 256]


def test_what_cannot_be_simulated_is_a_fault() -> None:
    desired = deployment(engine={"type": "vLLM"})
    question = reconcile_plan(view(desired, status(desired), windows=traffic(4))).plan_request
    assert question is not None
    failed = run_planner(desired.model_dump_json(exclude_none=True), PlanMachines(None), question)
    assert failed.review_result is None
    assert "no node has GPUs" in failed.faults[0]


def test_the_corrected_model_plans_for_the_observed_traffic() -> None:
    desired = deployment(planning={"maxGPUs": 6})
    question = reconcile_plan(view(desired, status(desired), windows=ask(30))).plan_request
    assert question is not None
    plain = replace(question, review=None)
    text = desired.model_dump_json(exclude_none=True)
    first = run_planner(text, PlanMachines(None), plain)
    assert question.fitted_inputs is not None
    slow = LatencyCorrection(prefill=1.5, decode=1.5, of=question.model_hash)
    basis = question.fitted_inputs.model_copy(update={"correction": slow})
    second = run_planner(text, PlanMachines(None), replace(plain, fitted_inputs=basis))
    assert first.plan is not None
    assert second.plan is not None
    assert second.plan["gpus"] > first.plan["gpus"]
    assert "corrected by x1.50" in second.plan["predicted"]["trust"]
