"""The selected plan is predicted by several samples, and another is selected if it fails them."""

from dataclasses import replace

import pytest

from cleave.planner.plan import PlanVerdict
from cleave.planner.result import confirmation
from cleave.planner.result.confirmation import SampledService, confirm_best, sample_service
from cleave.planner.result.prediction import PredictedPlan, predict
from cleave.planner.result.text import format_attainment
from cleave.planner.result.verdict import rank_plans
from cleave.planner.search.candidate_placement import build_deployed_cell
from cleave.planner.search.context import SearchContext
from cleave.simulator.outcome import SimulationResult

from tests.support.known_problems import chat, of_size, split, whole
from tests.support.known_problems import problem as known_problem

PROBLEM = known_problem(chat(6.0))
SEARCH = SearchContext.from_problem(PROBLEM)


def predict_few(decode: int) -> PredictedPlan:
    one = of_size(PROBLEM)
    return predict(SEARCH, split(PROBLEM, one, 1, one, decode), "Algorithm 1")


def serve(monkeypatch, *shares: tuple[float, float]) -> None:
    """The next plans that are confirmed attain these shares, with these errors."""
    left = iter(shares)

    def sample(*_: object) -> SampledService:
        share, error = next(left)
        return replace(real, attainment=share, error=error)

    fleet = build_deployed_cell(PROBLEM, predict_few(1).placement, 0)
    real = sample_service(SEARCH.trials, fleet, PROBLEM.rate, SEARCH.targets)
    monkeypatch.setattr(confirmation, "sample_service", sample)


def test_samples_are_none_of_the_searchs_and_end_when_they_agree(monkeypatch) -> None:
    seeds = []
    simulate = type(SEARCH.trials).simulate

    def record(trials, *more) -> SimulationResult:
        seeds.append(trials.seed)
        return simulate(trials, *more)

    monkeypatch.setattr(type(SEARCH.trials), "simulate", record)
    one = of_size(PROBLEM)
    ample = build_deployed_cell(PROBLEM, whole(PROBLEM, one, 8), 0)
    found = sample_service(SEARCH.trials, ample, PROBLEM.rate, SEARCH.targets)
    assert seeds == [101, 102, 103]
    assert found.error < 0.01
    span = SEARCH.trials.compute_span(PROBLEM.rate, SEARCH.targets)
    assert len(found.ttft_ms) == 3 * span.counted


def test_samples_that_disagree_are_thirty_and_the_error_is_shown() -> None:
    one = of_size(PROBLEM)
    scarce = build_deployed_cell(PROBLEM, whole(PROBLEM, one, 1), 0)
    goodput = predict(SEARCH, whole(PROBLEM, one, 1), "").plan.prediction.goodput
    found = sample_service(SEARCH.trials, scarce, 1.05 * goodput, SEARCH.targets)
    span = SEARCH.trials.compute_span(1.05 * goodput, SEARCH.targets)
    assert found.error > 0.01
    assert len(found.ttft_ms) == 30 * span.counted


@pytest.mark.parametrize(("error", "text"), [(0.0, "90 %"), (0.009, "90 %"), (0.031, "90 % +- 3")])
def test_an_error_of_more_than_a_point_is_shown(error: float, text: str) -> None:
    prediction = replace(predict_few(1).plan.prediction, attainment=0.9, attainment_error=error)
    assert format_attainment(prediction) == text


def test_a_plan_that_other_samples_refute_gives_way_to_the_next(monkeypatch) -> None:
    small, large = predict_few(2), predict_few(3)
    ranking = rank_plans(PROBLEM, [small, large])
    assert ranking.ordered[0] is small
    serve(monkeypatch, (0.8, 0.05), (0.95, 0.01))
    confirmed = confirm_best(SEARCH, ranking)
    assert confirmed.verdict is PlanVerdict.DISAGGREGATE
    assert [each.placement for each in confirmed.ordered] == [large.placement, small.placement]
    assert [each.plan.prediction.attainment for each in confirmed.ordered] == [0.95, 0.8]


def test_a_doubt_is_no_reason_for_another_plan(monkeypatch) -> None:
    small, large = predict_few(2), predict_few(3)
    serve(monkeypatch, (0.88, 0.05))
    confirmed = confirm_best(SEARCH, rank_plans(PROBLEM, [small, large]))
    assert confirmed.ordered[0].placement == small.placement
    assert confirmed.ordered[0].plan.prediction.attainment_error == 0.05


def test_where_none_holds_the_first_plan_stays(monkeypatch) -> None:
    small, large = predict_few(2), predict_few(3)
    serve(monkeypatch, (0.8, 0.05), (0.85, 0.01))
    confirmed = confirm_best(SEARCH, rank_plans(PROBLEM, [small, large]))
    assert confirmed.ordered[0].placement == small.placement
    assert confirmed.ordered[0].plan.prediction.attainment == 0.8
