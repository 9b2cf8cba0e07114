"""The sentences about a selected plan."""

from dataclasses import replace

import pytest

from cleave.planner.plan import PlanVerdict
from cleave.planner.problem import Problem
from cleave.planner.result import margins, verdict
from cleave.planner.result.prediction import PredictedPlan, predict
from cleave.planner.result.verdict import Ranking

from tests.support import known_problems


@pytest.fixture(scope="module")
def problem() -> Problem:
    return known_problems.blog(rate=1.0)


@pytest.fixture(scope="module")
def finalists(problem: Problem) -> tuple[PredictedPlan, PredictedPlan]:
    search, one = known_problems.search(problem), known_problems.of_size(problem)
    whole = known_problems.whole(problem, one)
    split = known_problems.split(problem, one, 1, one, 1)
    return predict(search, whole, "colocated"), predict(search, split, "Algorithm 1")


def with_goodput(finalist: PredictedPlan, goodput: float) -> PredictedPlan:
    interval = 0.97 * goodput, 1.03 * goodput
    seen = replace(finalist.plan.prediction, goodput=goodput, goodput_interval=interval)
    return replace(finalist, plan=replace(finalist.plan, prediction=seen))


@pytest.mark.parametrize(("goodput", "limit"), [(2.0, "2.00"), (0.965, "1.00")])
def test_a_plan_without_margin_is_said_to_have_none_and_no_lower_rate_needs_more(
    problem: Problem,
    finalists: tuple[PredictedPlan, PredictedPlan],
    goodput: float,
    limit: str,
) -> None:
    ranking = Ranking(PlanVerdict.COLOCATE, (with_goodput(finalists[0], goodput), finalists[1]))
    reason = verdict.explain_selection(problem, ranking, "")
    warnings = list(margins.list_close_calls(problem, ranking.ordered[0], []))
    assert f"or above {limit} req/s the" in verdict.describe_runner_up(problem, ranking, None)
    if goodput > 1:
        assert "1M tp1 holds 1.00 req/s" in reason
        assert warnings == []
    else:
        assert "1M tp1 just holds 1.00 req/s" in reason
        (warning,) = warnings
        assert "serves 0.965 req/s (0.936-0.994 req/s, 95 % confidence), below" in warning


def test_plans_that_need_as_much_and_serve_as_much_are_said_to_be_either(
    problem: Problem, finalists: tuple[PredictedPlan, PredictedPlan]
) -> None:
    whole, split = finalists
    double = replace(with_goodput(whole, 2.0), placement=whole.placement.with_copies(2))
    ranking = Ranking(PlanVerdict.COLOCATE, (double, with_goodput(split, 2.04)))
    reason = verdict.explain_selection(problem, ranking, "")
    assert "either would do: the best disaggregated plan needs as much, and its goodput" in reason
    assert "within 2 %" in reason


def test_of_plans_that_take_as_much_the_one_with_most_goodput_comes_first(
    problem: Problem, finalists: tuple[PredictedPlan, PredictedPlan]
) -> None:
    less, more, larger = (
        with_goodput(replace(finalists[0], placement=finalists[0].placement.with_copies(n)), rate)
        for n, rate in ((1, 2.0), (1, 4.0), (2, 9.0))
    )
    assert verdict.rank_plans(problem, [larger, less, more]).ordered == (more, less, larger)


def test_of_a_rival_that_does_not_hold_it_is_said_what_it_serves_with_how_much(
    problem: Problem, finalists: tuple[PredictedPlan, PredictedPlan]
) -> None:
    whole, split = finalists
    seen = replace(with_goodput(split, 0.9).plan.prediction, attainment=0.899)
    missing = replace(split, plan=replace(split.plan, prediction=seen))
    reason = verdict.explain_selection(problem, Ranking(PlanVerdict.COLOCATE, (whole, missing)), "")
    said = "no disaggregated plan that holds the rate was found; the best serves 0.900 req/s with"
    assert f"{said} 2 GPUs" in reason


def test_a_selected_plan_of_which_more_samples_show_less_than_the_target_nearly_holds(
    problem: Problem, finalists: tuple[PredictedPlan, PredictedPlan]
) -> None:
    whole, split = finalists
    seen = replace(whole.plan.prediction, attainment=0.897)
    ranking = verdict.rank_plans(problem, [split, whole])
    shown = replace(whole, plan=replace(whole.plan, prediction=seen))
    ranking = replace(ranking, ordered=(shown, split))
    assert "1M tp1 nearly holds 1.00 req/s with 1 GPU (89.7 % of" in verdict.explain_selection(
        problem, ranking, ""
    )
